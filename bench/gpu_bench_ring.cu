/*
 * Speed of the ring over GPUs of this machine: processes with a GPU each over NCCL, then threads of
 * one process over peer copies. Every row is checked on a short problem against one GPU, then timed
 * warm: wall time of a call on the slowest rank, over --seconds of calls one behind the other.
 * Efficiency is the time of the whole problem on one GPU, by the same clock, divided by the ranks
 * and by that. GPUs of one kind differ by some percent, and slow down by as much as they get warm:
 * so each is timed with the whole problem, all at once, before the ranks work together and
 * afterwards, and the mean is taken; where calls are short, twice in turns. The ranks wait for each
 * other, so that the slowest GPU sets their pace: efficiency by its time is printed, too. What
 * exchanges cost is read off a trace, in calls of their own; --trace PREFIX keeps it in
 * PREFIX.ROW.TRANSPORT.CALL.RANK.json.
 */
#include <algorithm>
#include <cmath>
#include <cstring>
#include <ctime>
#include <numeric>
#include <thread>

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

extern "C" {
#include "comm/comm.h"
}
#include "gpu_bench_shard.h"

static const ring_shape shapes[] = {
    {"d512 32/4 causal, 65536, zigzag", 65536, 32, 4, 512, 0, 0, true},
    {"d512 32/4 causal, 65536, contiguous", 65536, 32, 4, 512, 0, 0, false},
    {"d256 32/16 window 1024, 65536, contiguous", 65536, 32, 16, 256, 1024, 0, false},
    {"d512 32/4 causal, 16384 in 8 documents, contiguous", 16384, 32, 4, 512, 0, 8, false},
    {"d512 32/4 causal, 16384 in 8 documents, zigzag", 16384, 32, 4, 512, 0, 8, true},
};
enum { SHAPES = sizeof shapes / sizeof shapes[0], CHECKED_SEQ = 4096, TIMEOUT_MS = 120000 };
enum { ROUNDS = 2 }; /* of one GPU and the ranks in turns */
/* Calls that follow an idle time are not typical: about a second after its load began, a GPU at its
 * power limit slows down by a fifth for a moment. */
static const double warm_seconds = 1.25;
static const double long_seconds = 0.05;       /* of a call: one round */
static const double difference_allowed = 1e-2; /* bf16, in another order */

struct options {
    int ranks = 2;
    double seconds = 0.5;
    const char *only = "", *trace = nullptr;
    bool nccl = true, peers = true;
};

/* What the children of this process share. */
struct board {
    bool failed;
};

/* Milliseconds of a forward and a backward call; of one GPU alone, those of the slowest, too. */
struct times {
    double ms[2], slowest[2];
};

struct seat {
    const options *o;
    board *b;
    const char *transport;
    ra_comm *comm;
    ra_backend *backend;
    int device;
};

static double now()
{
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- ranks together */

static std::vector<double> gather(ra_comm *comm, double value)
{
    std::vector<double> all((size_t)ra_comm_size(comm));
    MUST_RA(ra_comm_gather(comm, &value, sizeof value, all.data(), TIMEOUT_MS));
    return all;
}

/* The largest of all ranks' values; also a barrier. */
static double largest(ra_comm *comm, double value)
{
    std::vector<double> all = gather(comm, value);
    return *std::max_element(all.begin(), all.end());
}

static double mean(ra_comm *comm, double value)
{
    std::vector<double> all = gather(comm, value);
    return std::accumulate(all.begin(), all.end(), 0.0) / (double)all.size();
}

/* Seconds of `calls` calls, one behind the other, on the slowest rank. */
static double run_calls(const shard &p, ra_comm *comm, bool backward, int calls)
{
    largest(comm, 0);
    double start = now();
    for (int i = 0; i < calls; i++) {
        job_call(p, backward);
    }
    shard_wait(p);
    return largest(comm, now() - start);
}

/* Milliseconds of a call, warm. `seconds` are those of all rounds. */
static double time_calls(const shard &p, ra_comm *comm, bool backward, double seconds)
{
    enum { FIRST_CALLS = 2 };
    double each = run_calls(p, comm, backward, FIRST_CALLS) / FIRST_CALLS;
    int calls = (int)std::ceil(warm_seconds / each);
    each = run_calls(p, comm, backward, calls) / calls;
    calls = (int)std::ceil(seconds / (each < long_seconds ? ROUNDS : 1) / each);
    calls = std::max(calls, 2);
    return 1e3 * run_calls(p, comm, backward, calls) / calls;
}

static times time_both(const seat &at, const ring_shape &s, ra_comm *comm)
{
    times t = {};
    shard p;
    shard_open(s, at.backend, comm, at.device, nullptr, &p);
    for (int backward = 0; backward < 2; backward++) {
        t.ms[backward] = time_calls(p, comm, backward != 0, at.o->seconds);
    }
    job_close(&p);
    return t;
}

static double check(const seat &at, const ring_shape &s)
{
    ring_shape cut = s;
    ra_comm *alone = nullptr;
    shard part, whole;
    cut.seq = CHECKED_SEQ;
    MUST_RA(ra_comm_open_threads(1, &alone));
    shard_open(cut, at.backend, at.comm, at.device, nullptr, &part);
    shard_open(cut, at.backend, alone, at.device, nullptr, &whole);
    for (int backward = 0; backward < 2; backward++) {
        job_call(part, backward != 0);
        job_call(whole, backward != 0);
    }
    shard_wait(part);
    double worst = shard_difference(part, whole);
    job_close(&part);
    job_close(&whole);
    ra_comm_close(alone);
    return largest(at.comm, worst);
}

static bool same_problem(const ring_shape &a, const ring_shape &b)
{
    return a.seq == b.seq && a.head_dim == b.head_dim && a.window == b.window &&
           a.documents == b.documents;
}

/* The whole problem on one GPU: all ranks' are at work at once, each for itself. */
static times time_single(const seat &at, const ring_shape &s)
{
    ra_comm *alone = nullptr;
    MUST_RA(ra_comm_open_threads(1, &alone));
    largest(at.comm, 0);
    times t = time_both(at, s, alone);
    for (int backward = 0; backward < 2; backward++) {
        t.slowest[backward] = largest(at.comm, t.ms[backward]);
        t.ms[backward] = mean(at.comm, t.ms[backward]);
    }
    ra_comm_close(alone);
    return t;
}

/* What a trace says of a rank's calls, as shares of their time. */
struct shares {
    double compute, exposed;
};

/* Of the ranks, the smallest share of computation and the largest of waits for exchanges; the first
 * call warms up. A trace waits for every computation, so these calls are not timed. */
static shares read_trace(const seat &at, int index, bool backward)
{
    enum { EVENTS = 4096, CALLS = 3 };
    int rank = ra_comm_rank(at.comm);
    ra_trace *trace = nullptr;
    shard p;
    MUST_RA(ra_trace_create(EVENTS, &trace));
    shard_open(shapes[index], at.backend, at.comm, at.device, trace, &p);
    ra_trace_summary sum = {}, warm = {};
    sum.size = warm.size = sizeof sum;
    for (int call = 0; call < CALLS; call++) {
        largest(at.comm, 0);
        job_call(p, backward);
        shard_wait(p);
        MUST_RA(ra_trace_summarize(trace, rank, call == 0 ? &warm : &sum));
    }
    if (at.o->trace) {
        std::string path = std::string(at.o->trace) + "." + std::to_string(index) + "." +
                           at.transport + (backward ? ".backward." : ".forward.") +
                           std::to_string(rank) + ".json";
        MUST_RA(ra_trace_write(trace, path.c_str()));
    }
    job_close(&p);
    ra_trace_free(trace);
    double wall = sum.wall - warm.wall;
    return {-largest(at.comm, -(sum.compute - warm.compute) / wall),
            largest(at.comm, (sum.exposed - warm.exposed) / wall)};
}

/* One GPU and the ranks together, in turns. */
struct row_times {
    std::vector<times> single; /* one more, before and behind */
    std::vector<times> ranks;
};

static double mean_of(const std::vector<times> &t, double (times::*values)[2], int backward)
{
    double sum = 0;
    for (const times &one : t) {
        sum += (one.*values)[backward];
    }
    return sum / (double)t.size();
}

/* last: one GPU's, from the row before if that is of the same problem. */
static row_times time_row(const seat &at, const ring_shape &s, const times *last)
{
    row_times t;
    t.single.push_back(last ? *last : time_single(at, s));
    do {
        t.ranks.push_back(time_both(at, s, at.comm));
        t.single.push_back(time_single(at, s));
    } while (t.ranks.size() < ROUNDS && t.ranks[0].ms[0] < 1e3 * long_seconds);
    return t;
}

static void print_row(const seat &at, int index, int backward, const row_times &t,
                      const shares &share, double difference)
{
    double one = mean_of(t.single, &times::ms, backward);
    double slowest = mean_of(t.single, &times::slowest, backward);
    double together = mean_of(t.ranks, &times::ms, backward);
    std::printf("%-8s %-52s %-8s %9.3f ms, one GPU %9.3f ms (", at.transport, shapes[index].name,
                backward ? "backward" : "forward", together, one);
    for (size_t i = 0; i < t.single.size(); i++) {
        std::printf("%s%.3f", i > 0 ? ", " : "", t.single[i].ms[backward]);
    }
    std::printf(
        "): efficiency %.3f, %.3f of the slowest GPU's, compute %5.1f %%, exposed %4.1f %%, "
        "differs by %.1e\n",
        one / ra_comm_size(at.comm) / together, slowest / ra_comm_size(at.comm) / together,
        100 * share.compute, 100 * share.exposed, difference);
    std::fflush(stdout);
}

/* last: one GPU's times and problem, behind the row before; then of this row. */
static void run_row(const seat &at, int index, const ring_shape **last, times *single)
{
    const ring_shape &s = shapes[index];
    bool first = ra_comm_rank(at.comm) == 0;
    double difference = check(at, s);
    if (difference > difference_allowed) {
        at.b->failed = true;
        if (first) {
            std::printf("%-8s %-52s WRONG: differs from one GPU by %.3g; not timed\n", at.transport,
                        s.name, difference);
        }
        return;
    }
    row_times t = time_row(at, s, *last && same_problem(**last, s) ? single : nullptr);
    *last = &s;
    *single = t.single.back();
    for (int backward = 0; backward < 2; backward++) {
        shares share = read_trace(at, index, backward != 0);
        if (first) {
            print_row(at, index, backward, t, share, difference);
        }
    }
}

static void run_rank(seat at)
{
    const ring_shape *last = nullptr;
    times single = {};
    at.device = ra_comm_rank(at.comm) % ra_cuda_device_count();
    MUST_RA(ra_backend_open_cuda(at.device, nullptr, &at.backend));
    for (int i = 0; i < SHAPES; i++) {
        if (strstr(shapes[i].name, at.o->only)) {
            run_row(at, i, &last, &single);
        }
    }
    ra_comm_close(at.comm);
    ra_backend_close(at.backend);
}

/* ---- processes and threads */

static void run_process(const options &o, board *b, int rank, const int ends[2])
{
    ra_nccl_id id;
    seat at = {&o, b, "nccl", nullptr, nullptr, 0};
    if (rank == 0) {
        MUST_RA(ra_nccl_id_create(&id));
    }
    for (int i = 1; i < o.ranks; i++) {
        if (rank == 0) {
            must(write(ends[1], &id, sizeof id) == (ssize_t)sizeof id, "id", "pipe");
        }
    }
    must(rank == 0 || read(ends[0], &id, sizeof id) == (ssize_t)sizeof id, "id", "pipe");
    MUST_RA(ra_comm_open_nccl(&id, rank, o.ranks, rank, &at.comm));
    run_rank(at);
}

static void run_threads(const options &o, board *b)
{
    std::vector<ra_comm *> comms((size_t)o.ranks);
    std::vector<std::thread> threads;
    MUST_RA(ra_comm_open_threads_cuda(o.ranks, comms.data()));
    for (ra_comm *comm : comms) {
        threads.emplace_back([&o, b, comm] { run_rank({&o, b, "peers", comm, nullptr, 0}); });
    }
    for (std::thread &thread : threads) {
        thread.join();
    }
}

static pid_t start(const std::function<void()> &body)
{
    std::fflush(stdout);
    pid_t child = fork();
    must(child >= 0, "fork", "failed");
    if (child == 0) {
        body();
        std::fflush(stdout);
        _exit(0);
    }
    return child;
}

/* A child that fails leaves the others waiting for it. */
static void wait_for(const std::vector<pid_t> &children, board *b)
{
    for (size_t left = children.size(); left > 0; left--) {
        int status = 0;
        waitpid(-1, &status, 0);
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
            b->failed = true;
            for (pid_t child : children) {
                kill(child, SIGKILL);
            }
        }
    }
}

static options parse(int argc, char **argv)
{
    options o;
    for (int i = 1; i < argc; i++) {
        bool more = i + 1 < argc;
        if (!std::strcmp(argv[i], "--no-peers")) {
            o.peers = false;
        } else if (!std::strcmp(argv[i], "--no-nccl")) {
            o.nccl = false;
        } else if (!std::strcmp(argv[i], "--ranks") && more) {
            o.ranks = std::atoi(argv[++i]);
        } else if (!std::strcmp(argv[i], "--seconds") && more) {
            o.seconds = std::atof(argv[++i]);
        } else if (!std::strcmp(argv[i], "--only") && more) {
            o.only = argv[++i];
        } else if (!std::strcmp(argv[i], "--trace") && more) {
            o.trace = argv[++i];
        } else {
            std::fprintf(stderr, "usage: gpu_bench_ring [--ranks N] [--only TEXT] [--seconds S] "
                                 "[--no-nccl] [--no-peers] [--trace PREFIX]\n");
            std::exit(2);
        }
    }
    return o;
}

/* The parent stays without CUDA, which does not survive a fork. */
int main(int argc, char **argv)
{
    options o = parse(argc, argv);
    void *shared =
        mmap(nullptr, sizeof(board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    must(shared != MAP_FAILED, "mmap", "failed");
    board *b = static_cast<board *>(shared);
    int ends[2];
    must(pipe(ends) == 0, "pipe", "failed");
    std::vector<pid_t> ranks;
    for (int rank = 0; o.nccl && rank < o.ranks; rank++) {
        ranks.push_back(start([&, rank] { run_process(o, b, rank, ends); }));
    }
    wait_for(ranks, b);
    if (o.peers) {
        wait_for({start([&] { run_threads(o, b); })}, b);
    }
    return b->failed ? 1 : 0;
}
