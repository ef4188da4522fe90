/*
 * Speed of the CUDA backend on one rank, sustained: every row is checked on sampled results, run
 * for --seconds to warm up, then timed for as long; a cuBLAS bf16 product of 8192^3 is timed the
 * same way in the same process, before and after, as the measure of what the device can do at its
 * power limit. Goes through the public API, so that what is timed is what a caller gets.
 */
#include <cstring>

#include "gpu_bench.h"

static const shape shapes[] = {
    {1, 8192, 32, 4, 512, false, 0},
    {1, 8192, 32, 4, 512, true, 0},
    {1, 32768, 32, 4, 512, true, 0},
    {2, 8192, 8, 1, 512, true, 0},
    {1, 8192, 32, 4, 512, false, 0, HOP},
    {64, 1024, 32, 4, 512, true, 0},
    {1, 65536, 32, 4, 512, true, 0, DOCUMENTS, false, 0, "d512 32/4 causal b64 s1024"},
    {1, 32768, 32, 4, 512, true, 0, RANDOM, false, 0, "d512 32/4 causal b1 s32768", true},
    {1, 8192, 32, 16, 256, false, 0},
    {1, 8192, 32, 16, 256, true, 0},
    {1, 8192, 32, 16, 256, true, 1024},
    {1, 32768, 32, 16, 256, true, 1024},
    {1, 8192, 32, 16, 256, true, 512},
    {1, 32768, 32, 16, 256, true, 512},
    {1, 32768, 32, 16, 256, true, 1024, IMAGES, false, 0, "d256 32/16 window1024 b1 s32768", true},

    {1, 8192, 32, 4, 512, false, 0, WHOLE, true},
    {1, 8192, 32, 4, 512, true, 0, WHOLE, true},
    {1, 32768, 32, 4, 512, true, 0, WHOLE, true},
    {1, 8192, 32, 4, 512, true, 0, WHOLE, true, 64, "d512 32/4 causal b1 s8192"},
    {1, 8192, 32, 16, 256, false, 0, WHOLE, true},
    {1, 8192, 32, 16, 256, true, 0, WHOLE, true},
    {1, 8192, 32, 16, 256, true, 1024, WHOLE, true},
    {1, 32768, 32, 16, 256, true, 1024, WHOLE, true},
    {1, 8192, 32, 16, 256, true, 512, WHOLE, true},
    {1, 32768, 32, 16, 256, true, 512, WHOLE, true},
};

struct options {
    double seconds = 0.5;
    bool backward = false, simple = false;
    const char *only = "", *json = nullptr;
};

struct result {
    std::string name, kernel, against;
    bool backward, timed, pass;
    double error, milliseconds, tflops, tile_tflops;
    double against_ratio; /* 0 = the other row was not timed */
};

/* ---- rows */

static ra_backend *open_backend(int workspace_mib, bool simple)
{
    ra_backend *backend = nullptr;
    ra_cuda_options options = {};
    options.size = sizeof options;
    options.workspace_bytes = (size_t)workspace_mib << 20;
    options.simple_only = simple;
    MUST_RA(ra_backend_open_cuda(0, &options, &backend));
    return backend;
}

static result run_shape(const shape &s, ra_backend *backend, const options &o, bool time)
{
    problem p;
    result r = {};
    problem_open(s, backend, &p);
    r.name = name_of(s);
    r.backward = s.backward;
    r.error = problem_check(p, s.backward);
    r.kernel = ra_cuda_kernel(backend, s.backward);
    r.pass = r.error <= 1;
    if (time && r.pass) {
        r.timed = true;
        r.milliseconds = time_sustained(o.seconds, [&] { problem_call(p, s.backward); });
        r.tflops = problem_flops(p, s.backward) / r.milliseconds * 1e-9;
        r.tile_tflops = problem_tile_flops(p, s.backward) / r.milliseconds * 1e-9;
    }
    problem_close(&p);
    return r;
}

/* The shape cut short first: what is wrong there is not run at length, and a plain kernel is not
 * timed. */
static result bench_shape(const shape &s, const options &o)
{
    ra_backend *backend = open_backend(s.workspace_mib, o.simple);
    shape cut = s;
    cut.rows = 1;
    cut.seq = s.holds == DOCUMENTS || s.holds == RANDOM ? 2500 : 1000;
    result r = run_shape(cut, backend, o, false);
    if (r.pass && (r.kernel != "simple" || o.simple)) {
        r = run_shape(s, backend, o, true);
    }
    r.name = name_of(s);
    ra_backend_close(backend);
    return r;
}

/* By pairs or by tiles, against an earlier row of the same direction. */
static void compare(const shape &s, const std::vector<result> &earlier, result *r)
{
    r->against = s.against;
    for (const result &other : earlier) {
        if (r->timed && other.timed && other.name == s.against && other.backward == s.backward) {
            r->against_ratio =
                s.by_tiles ? r->tile_tflops / other.tile_tflops : r->tflops / other.tflops;
        }
    }
}

/* ---- output */

static void print(const result &r, double cublas)
{
    std::printf("%-46s %-8s %-10s", r.name.c_str(), r.backward ? "backward" : "forward",
                r.kernel.c_str());
    if (!r.pass) {
        std::printf("  WRONG: error %.3g of what is allowed; not timed\n", r.error);
    } else if (!r.timed) {
        std::printf("  right, not timed: no tuned kernel\n");
    } else {
        std::printf(" %9.3f ms %7.1f TFLOP/s  %.3f of cuBLAS", r.milliseconds, r.tflops,
                    r.tflops / cublas);
        if (r.against_ratio > 0) {
            std::printf("  %.3f of %s", r.against_ratio, r.against.c_str());
        }
        std::printf("\n");
    }
    std::fflush(stdout);
}

static void write_row(std::FILE *file, const result &r, double cublas)
{
    std::fprintf(file,
                 "\n  {\"shape\": \"%s\", \"backward\": %s, \"kernel\": \"%s\", \"pass\": %s, "
                 "\"error_share\": %.4g, \"ms\": %.5g, \"tflops\": %.5g, \"tile_tflops\": %.5g, "
                 "\"ratio\": %.4g",
                 r.name.c_str(), r.backward ? "true" : "false", r.kernel.c_str(),
                 r.pass ? "true" : "false", r.error < 1e30 ? r.error : 1e30, r.milliseconds,
                 r.tflops, r.tile_tflops, r.tflops / cublas);
    if (!r.against.empty()) {
        std::fprintf(file, ", \"against\": \"%s\", \"against_ratio\": %.4g", r.against.c_str(),
                     r.against_ratio);
    }
    std::fprintf(file, "}");
}

static void write_json(const char *path, const std::vector<result> &results, double before,
                       double after)
{
    std::FILE *file = std::fopen(path, "w");
    must(file != nullptr, path, "cannot be written");
    std::fprintf(file, "{\"cublas_before\": %.1f, \"cublas_after\": %.1f, \"rows\": [", before,
                 after);
    for (size_t i = 0; i < results.size(); i++) {
        std::fprintf(file, "%s", i ? "," : "");
        write_row(file, results[i], (before + after) / 2);
    }
    std::fprintf(file, "\n]}\n");
    must(std::fclose(file) == 0, path, "cannot be written");
}

static options parse(int argc, char **argv)
{
    options o;
    for (int i = 1; i < argc; i++) {
        bool more = i + 1 < argc;
        if (!std::strcmp(argv[i], "--backward")) {
            o.backward = true;
        } else if (!std::strcmp(argv[i], "--simple")) {
            o.simple = true;
        } else if (!std::strcmp(argv[i], "--seconds") && more) {
            o.seconds = std::atof(argv[++i]);
        } else if (!std::strcmp(argv[i], "--only") && more) {
            o.only = argv[++i];
        } else if (!std::strcmp(argv[i], "--json") && more) {
            o.json = argv[++i];
        } else {
            std::fprintf(stderr, "usage: gpu_bench [--backward] [--only TEXT] [--seconds S] "
                                 "[--json FILE] [--simple]\n"
                                 "Times the forward, or with --backward the backward.\n");
            std::exit(2);
        }
    }
    return o;
}

int main(int argc, char **argv)
{
    options o = parse(argc, argv);
    std::vector<result> results;
    bool pass = true;
    double before = time_cublas(o.seconds);
    std::printf("cuBLAS bf16 8192^3: %.1f TFLOP/s before\n", before);
    for (const shape &s : shapes) {
        if (s.backward == o.backward && name_of(s).find(o.only) != std::string::npos) {
            result r = bench_shape(s, o);
            compare(s, results, &r);
            print(r, before);
            pass = pass && r.pass;
            results.push_back(r);
        }
    }
    double after = time_cublas(o.seconds);
    std::printf("cuBLAS bf16 8192^3: %.1f TFLOP/s after\n", after);
    if (o.json) {
        write_json(o.json, results, before, after);
    }
    return pass ? 0 : 1;
}
