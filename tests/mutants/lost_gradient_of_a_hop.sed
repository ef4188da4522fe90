# src/ring/route.c
# What comes home from the first hop's reader is not added.
s/^            RA_TRY(add(backend, &to, &from));/            RA_TRY(at->hop == 1 ? RA_OK : add(backend, \&to, \&from));/
