# src/backend/cpu/fold.c
# Scores rounded to half precision before the softmax.
s/^    run->operands->product(&scores);/    run->operands->product(\&scores);\
    for (int64_t i = 0; i < count * SCORE_ROW; i++) {\
        tile->score[i] = ra_bf16_to_f32(ra_f32_to_bf16(tile->score[i]));\
    }/
