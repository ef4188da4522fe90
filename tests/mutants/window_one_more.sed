# src/plan/cover.c
# A window that does not count the query itself.
s/^    return ra_mask_reach(&cover->mask, pos, block);/    ra_mask mask = cover->mask;\
    mask.window += mask.window > 0;\
    return ra_mask_reach(\&mask, pos, block);/
