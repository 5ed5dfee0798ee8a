/* json.h: writes one JSON object into a buffer of fixed size; for STATUS answers. Reads nothing. */
#ifndef KP_JSON_H
#define KP_JSON_H

#include <stddef.h>
#include <stdint.h>

struct kp_json {
    char *text;
    size_t size, used; /* used < size always; text is terminated */
    int comma, full;
};

void kp_json_begin(struct kp_json *json, char *text, size_t size);
/* `key` NULL: the outermost object, or an element of an array. */
void kp_json_object(struct kp_json *json, const char *key);
void kp_json_object_end(struct kp_json *json);
void kp_json_array(struct kp_json *json, const char *key);
void kp_json_array_end(struct kp_json *json);
void kp_json_text(struct kp_json *json, const char *key, const char *value);
void kp_json_number(struct kp_json *json, const char *key, uint64_t value);
void kp_json_bool(struct kp_json *json, const char *key, int value);

/* Bytes written, or -EMSGSIZE when it did not fit. */
int kp_json_end(const struct kp_json *json);

#endif
