/*
 * Small pieces that every command's output is made of: JSON values, grouped numbers, sizes. Must
 * not know the commands.
 */
#ifndef RA_CLI_REPORT_H
#define RA_CLI_REPORT_H

#include <jansson.h>

#include "base/status.h"

enum { RA_NUMBER_BYTES = 40 };

/* 1234567 -> "1,234,567". Returns text. */
const char *ra_number_group(uint64_t value, char text[RA_NUMBER_BYTES]);
/* 1536 -> "1.5 KiB". Returns text. */
const char *ra_bytes_scale(uint64_t bytes, char text[RA_NUMBER_BYTES]);
/* JSON has no NaN and no infinity: they become null. */
json_t *ra_json_number(double value);
/* Any string as JSON; what is not UTF-8 loses its bytes above 127. */
json_t *ra_json_text(const char *text);
/* Prints to standard output and takes the reference. NULL stands for an allocation failure on the
 * way. */
ra_status ra_json_print(json_t *value);
/* "ringattn: <the thread's last message>" on standard error, control characters replaced: a message
 * may hold names from a hostile file. */
void ra_error_print(void);

#endif
