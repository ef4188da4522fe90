# src/plan/cover.c
# Image blocks over the window where the layer asks for them within it, and the other way round.
s/^    return ra_mask_reach(&cover->mask, pos, block);/    ra_mask mask = cover->mask;\
    if (mask.vision != RA_VISION_OFF) {\
        mask.vision = mask.vision == RA_VISION_OVER_WINDOW ? RA_VISION_WITHIN_WINDOW\
                                                           : RA_VISION_OVER_WINDOW;\
    }\
    return ra_mask_reach(\&mask, pos, block);/
