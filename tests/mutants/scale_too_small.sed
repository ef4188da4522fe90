# src/attn/attn.c
# A softmax scale that is 1 % off.
s/\.scale = plan->layer->scale,/.scale = plan->layer->scale * 0.99f,/
