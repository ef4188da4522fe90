# src/ring/route.c
# What comes home from the first hop's reader is not added.
s/^    return add_landed(r, &leg->send, begin, end);/    return hop == 1 ? RA_OK : add_landed(r, \&leg->send, begin, end);/
