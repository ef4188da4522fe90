/* A transport in front of another, through which one rank is killed, stopped or late, or returns an
 * error, at one moment of one exchange. Must not know the transport behind it. */
#ifndef RA_TESTS_SUPPORT_FAULT_H
#define RA_TESTS_SUPPORT_FAULT_H

#include <stdbool.h>

#include "ringattn.h"

enum { FAULT_SET_UP, FAULT_FORWARD, FAULT_BACKWARD }; /* phases */

/* What happens to the victim: "kill", "stop", "slow" (late by late_ms), "error", "cut" (of its
 * network: it makes the file cut.asked in folder and waits for cut.done; without a folder it takes
 * the loopback of its network namespace down) or "none", "before", "at"
 * (in the middle of) or "after" the call-th exchange of a phase. */
typedef struct fault {
    const char *kind, *moment, *folder;
    int victim, phase, call, late_ms;
} fault;

typedef struct fault_wire {
    ra_comm *inner; /* first, for support_relay.h */
    const fault *plan;
    bool borrowed;          /* inner: it is not closed */
    int rank, phase, calls; /* calls of this phase so far; the test sets both when one begins */
} fault_wire;

/* Takes over wire->inner unless it is borrowed; the wire stays the caller's until the comm is
 * closed. */
ra_status fault_comm_open(fault_wire *wire, ra_comm **out);

/* A network namespace of its own, with nothing but a loopback, for this process and those that it
 * starts from now on; false where that is not allowed. */
bool fault_network_own(void);
bool fault_network_set(bool up);

#endif
