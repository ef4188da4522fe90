# src/plan/tokens.c
# All documents of a row are one.
s/doc > 0 ? doc : 0/doc > 0 ? 1 : 0/
