/* A transport in front of another. Everything is passed on; a test replaces the callbacks it is
 * about. */
#ifndef RA_TESTS_SUPPORT_RELAY_H
#define RA_TESTS_SUPPORT_RELAY_H

#include "ringattn.h"

/* user: a struct whose first member is ra_comm *inner, the comm behind it. Its close closes inner
 * too. */
ra_comm_callbacks relay_callbacks(void *user);
/* A close for an inner comm that is only borrowed. */
void relay_close_nothing(void *user);

#endif
