# src/plan/cover.c
# A causal mask that is off by one.
s/^    return ra_mask_reach(&cover->mask, pos, block);/    ra_range reach = ra_mask_reach(\&cover->mask, pos, block);\
    reach.end++;\
    return reach;/
