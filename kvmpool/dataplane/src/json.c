/* json.c: see json.h. */
#include "json.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>

static void put(struct kp_json *json, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void put(struct kp_json *json, const char *format, ...)
{
    va_list arguments;
    int length;

    va_start(arguments, format);
    length = vsnprintf(json->text + json->used, json->size - json->used, format, arguments);
    va_end(arguments);
    if (length < 0 || (size_t)length >= json->size - json->used)
        json->full = 1;
    else
        json->used += (size_t)length;
}

static void put_string(struct kp_json *json, const char *value)
{
    put(json, "\"");
    for (const unsigned char *at = (const unsigned char *)value; *at; at++) {
        if (*at == '"' || *at == '\\')
            put(json, "\\%c", *at);
        else if (*at < 0x20 || *at >= 0x7f) /* names here are ASCII; anything else is shown, byte by byte */
            put(json, "\\u%04x", *at);
        else
            put(json, "%c", *at);
    }
    put(json, "\"");
}

static void put_key(struct kp_json *json, const char *key)
{
    if (json->comma)
        put(json, ",");
    json->comma = 1;
    if (key) {
        put_string(json, key);
        put(json, ":");
    }
}

void kp_json_begin(struct kp_json *json, char *text, size_t size)
{
    *json = (struct kp_json){ .text = text, .size = size };
    text[0] = '\0';
}

void kp_json_object(struct kp_json *json, const char *key)
{
    put_key(json, key);
    put(json, "{");
    json->comma = 0;
}

void kp_json_object_end(struct kp_json *json)
{
    put(json, "}");
    json->comma = 1;
}

void kp_json_array(struct kp_json *json, const char *key)
{
    put_key(json, key);
    put(json, "[");
    json->comma = 0;
}

void kp_json_array_end(struct kp_json *json)
{
    put(json, "]");
    json->comma = 1;
}

void kp_json_text(struct kp_json *json, const char *key, const char *value)
{
    put_key(json, key);
    put_string(json, value);
}

void kp_json_number(struct kp_json *json, const char *key, uint64_t value)
{
    put_key(json, key);
    put(json, "%" PRIu64, value);
}

void kp_json_bool(struct kp_json *json, const char *key, int value)
{
    put_key(json, key);
    put(json, "%s", value ? "true" : "false");
}

int kp_json_end(const struct kp_json *json)
{
    return json->full ? -EMSGSIZE : (int)json->used;
}
