# src/plan/cover.c
# A window that counts the query twice.
s/^    return ra_mask_reach(&cover->mask, pos, block);/    ra_mask mask = cover->mask;\
    mask.window -= mask.window > 1;\
    return ra_mask_reach(\&mask, pos, block);/
