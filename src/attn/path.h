/* Which of the three paths a layer takes: from configuration only, never from one rank's slice. */
#ifndef RA_ATTN_PATH_H
#define RA_ATTN_PATH_H

#include "base/status.h"

typedef enum ra_path { RA_PATH_GLOBAL, RA_PATH_SLIDING, RA_PATH_GENERAL } ra_path;

typedef struct ra_path_choice {
    ra_path path;
    const char *name, *reason;
} ra_path_choice;

ra_path_choice ra_path_choose(const ra_layer *layer, bool has_documents, bool has_vision,
                              bool contiguous);

#endif
