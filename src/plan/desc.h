/* Is a step description well formed by itself? What ranks must agree on is checked where they meet.
 * Must not know ranks or layers. */
#ifndef RA_PLAN_DESC_H
#define RA_PLAN_DESC_H

#include "base/status.h"

/* Size, rows, seq_local and runs: each run inside the row, together seq_local positions. */
ra_status ra_step_desc_check(const ra_step_desc *desc);

#endif
