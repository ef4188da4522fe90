# src/ring/route.c
# What comes home from the first hop's reader is not added.
s/^        RA_TRY(add_landed(r, &leg->send, piece, ops->add));/        RA_TRY(hop == 1 ? RA_OK : add_landed(r, \&leg->send, piece, ops->add));/
