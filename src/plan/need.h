/* Which key rows a rank's queries need: the union of their reaches, document by document. Must not
 * know who asks why. */
#ifndef RA_PLAN_NEED_H
#define RA_PLAN_NEED_H

#include "plan/cover.h"
#include "plan/pieces.h"

/* One needed range inside one piece of another rank; `context` is the caller's. */
typedef ra_status (*ra_need_visit)(void *context, const ra_owned_piece *piece, int64_t begin,
                                   int64_t end);

/* Visits, in (row, doc, pos) order and each row once, what `reader` needs of other ranks' rows. */
ra_status ra_need_walk(const ra_cover *rule, const ra_pieces *pieces, int reader,
                       ra_need_visit visit, void *context);

#endif
