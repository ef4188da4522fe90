/* Formatting helpers. */
#include "cli/report.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/limits.h"

const char *ra_number_group(uint64_t value, char text[RA_NUMBER_BYTES])
{
    char digits[RA_NUMBER_BYTES];
    int length = snprintf(digits, sizeof digits, "%" PRIu64, value), at = 0;
    for (int i = 0; i < length; i++) {
        if (i > 0 && (length - i) % 3 == 0) {
            text[at++] = ',';
        }
        text[at++] = digits[i];
    }
    text[at] = 0;
    return text;
}

const char *ra_bytes_scale(uint64_t bytes, char text[RA_NUMBER_BYTES])
{
    static const char *const unit[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
    double value = (double)bytes;
    int i = 0;
    while (value >= 1024 && i < 5) {
        value /= 1024;
        i++;
    }
    snprintf(text, RA_NUMBER_BYTES, i ? "%.1f %s" : "%.0f %s", value, unit[i]);
    return text;
}

json_t *ra_json_number(double value)
{
    return isfinite(value) ? json_real(value) : json_null();
}

json_t *ra_json_text(const char *text)
{
    json_t *value = json_string(text);
    char plain[RA_MESSAGE_BYTES];
    size_t at = 0;
    if (value) {
        return value;
    }
    for (const char *c = text; *c && at + 1 < sizeof plain; c++) {
        plain[at++] = (unsigned char)*c < 128 ? *c : '?';
    }
    plain[at] = 0;
    return json_string(plain);
}

ra_status ra_json_print(json_t *value)
{
    int failed = !value || json_dumpf(value, stdout, JSON_INDENT(2)) != 0;
    json_decref(value);
    if (failed) {
        return RA_FAIL(ferror(stdout) ? RA_E_IO : RA_E_NOMEM, "JSON output: could not be written");
    }
    putchar('\n');
    return RA_OK;
}

void ra_error_print(void)
{
    char text[RA_MESSAGE_BYTES];
    snprintf(text, sizeof text, "%s", ra_last_error());
    for (char *c = text; *c; c++) {
        if ((unsigned char)*c < 32 || *c == 127) {
            *c = '?';
        }
    }
    fprintf(stderr, "ringattn: %s\n", text);
}
