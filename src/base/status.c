/* Status names from the one list in the public header, and the thread's last message. */
#include "base/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/limits.h"

#define RA_TEXT_(x) #x
#define RA_TEXT(x) RA_TEXT_(x)

static _Thread_local char last_error[RA_MESSAGE_BYTES];

ra_status ra_fail(ra_status status, const char *format, ...)
{
    /* Written aside first: an argument may be the old message itself. */
    char text[RA_MESSAGE_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    memcpy(last_error, text, sizeof text);
    return status;
}

const char *ra_last_error(void)
{
    return last_error;
}

const char *ra_version(void)
{
    return RA_TEXT(RA_VERSION_MAJOR) "." RA_TEXT(RA_VERSION_MINOR) "." RA_TEXT(RA_VERSION_PATCH);
}

const char *ra_status_name(ra_status status)
{
    switch (status) {
#define RA_STATUS_NAME(name, code, text)                                                           \
    case name: return #name;
        RA_STATUS_LIST(RA_STATUS_NAME)
#undef RA_STATUS_NAME
    }
    return "RA_UNKNOWN";
}

const char *ra_status_text(ra_status status)
{
    switch (status) {
#define RA_STATUS_TEXT(name, code, text)                                                           \
    case name: return text;
        RA_STATUS_LIST(RA_STATUS_TEXT)
#undef RA_STATUS_TEXT
    }
    return "unknown status";
}
