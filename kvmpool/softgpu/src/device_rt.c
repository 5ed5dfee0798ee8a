/* What CUDA's device runtime offers kernels: printf, assert, malloc and free. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "launch.h"

#define KP_PRINT_BYTES 8192
#define KP_SPEC_BYTES 32
#define KP_HEAP_BYTES (64ull << 20) /* of all kernels of the process: a kernel that leaks must not take the machine along */
#define KP_HEAP_MARK 0x6b70686561700001ull

struct text {
	char bytes[KP_PRINT_BYTES];
	size_t used;
};

static void append(struct text *out, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void append(struct text *out, const char *format, ...)
{
	va_list list;

	va_start(list, format);
	const int n = vsnprintf(out->bytes + out->used, sizeof(out->bytes) - out->used, format, list);
	va_end(list);
	if (n > 0)
		out->used = out->used + (size_t)n < sizeof(out->bytes) ? out->used + (size_t)n : sizeof(out->bytes) - 1;
}

/* The next argument: ints take 4 bytes, everything else 8, each aligned to its size. */
static uint64_t next_argument(const uint8_t **at, size_t size)
{
	uint64_t value = 0;
	const uintptr_t aligned = ((uintptr_t)*at + size - 1) / size * size;

	memcpy(&value, (const void *)aligned, size);
	*at = (const uint8_t *)aligned + size;
	return value;
}

/* One conversion with its flags in `spec` ("%-08.3", no length, no letter). */
static void convert(struct text *out, char *spec, size_t spec_len, int wide, char letter, const uint8_t **args)
{
	uint64_t bits = 0;
	double real;

	if (strchr("di", letter)) {
		bits = next_argument(args, wide ? 8 : 4);
		snprintf(spec + spec_len, KP_SPEC_BYTES - spec_len, "ll%c", letter);
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
		append(out, spec, wide ? (long long)bits : (long long)(int32_t)bits);
	} else if (strchr("uoxXc", letter)) {
		bits = next_argument(args, wide ? 8 : 4);
		snprintf(spec + spec_len, KP_SPEC_BYTES - spec_len, letter == 'c' ? "%c" : "ll%c", letter);
		if (letter == 'c')
			append(out, spec, (int)bits);
		else
			append(out, spec, (unsigned long long)bits);
	} else if (strchr("fFeEgGaA", letter)) {
		bits = next_argument(args, 8);
		memcpy(&real, &bits, 8);
		snprintf(spec + spec_len, KP_SPEC_BYTES - spec_len, "%c", letter);
		append(out, spec, real);
	} else if (letter == 's' || letter == 'p') {
		bits = next_argument(args, 8);
		snprintf(spec + spec_len, KP_SPEC_BYTES - spec_len, "%c", letter);
		append(out, spec, (void *)(uintptr_t)bits);
#pragma GCC diagnostic pop
	}
}

/* Reads one conversion that begins at `%`; returns where the text goes on. */
static const char *conversion(struct text *out, const char *at, const uint8_t **args)
{
	char spec[KP_SPEC_BYTES] = "%";
	size_t len = 1;
	int wide = 0;

	for (at++; *at && strchr("-+ #0123456789.*", *at); at++) {
		if (*at == '*')
			len += (size_t)snprintf(spec + len, 12, "%d", (int32_t)next_argument(args, 4));
		else
			spec[len++] = *at;
		if (len > KP_SPEC_BYTES - 16)
			return at;
	}
	spec[len] = 0;
	for (; *at && strchr("hlLqjzt", *at); at++)
		wide |= *at != 'h';
	if (!*at)
		return at;
	if (*at == '%')
		append(out, "%%");
	else
		convert(out, spec, len, wide, *at, args);
	return at + 1;
}

int32_t kp_device_print(struct kp_thread *t, const char *format, const uint8_t *args)
{
	struct kp_launch_ctl *ctl = kp_current_launch()->ctl;
	struct text out = {.used = 0};
	int32_t converted = 0;

	(void)t;
	while (*format && out.used < sizeof(out.bytes) - 1) {
		if (*format == '%') {
			format = conversion(&out, format, &args);
			converted++;
		} else {
			out.bytes[out.used++] = *format++;
		}
	}
	if (ctl->print) {
		ctl->print(ctl->print_arg, out.bytes, out.used);
	} else {
		fwrite(out.bytes, 1, out.used, stdout);
		fflush(stdout);
	}
	return converted;
}

void kp_device_assert_fail(struct kp_thread *t, const char *message, const char *file, uint32_t line,
			   const char *function)
{
	char text[1024];
	const uint32_t *block = t->b->ctaid, *thread = t->tid;

	snprintf(text, sizeof(text), "%s:%u: %s: block: [%u,%u,%u], thread: [%u,%u,%u] Assertion `%s` failed.\n", file, line,
		 function, block[0], block[1], block[2], thread[0], thread[1], thread[2], message);
	fputs(text, stderr);
	kp_launch_fail(KP_ASSERT, 43, 0, "device-side assert");
}

static uint64_t heap_used;

void *kp_device_allocate(struct kp_thread *t, uint64_t size)
{
	(void)t;
	if (size > KP_HEAP_BYTES || __atomic_add_fetch(&heap_used, size, __ATOMIC_RELAXED) > KP_HEAP_BYTES) {
		if (size <= KP_HEAP_BYTES)
			__atomic_sub_fetch(&heap_used, size, __ATOMIC_RELAXED);
		return NULL;
	}
	uint64_t *memory = malloc(size + 16);

	if (!memory)
		return NULL;
	memory[0] = KP_HEAP_MARK;
	memory[1] = size;
	return memory + 2;
}

void kp_device_release(struct kp_thread *t, void *pointer)
{
	uint64_t *memory = pointer;

	if (!memory)
		return;
	if (memory[-2] != KP_HEAP_MARK)
		t->b->rt->trap(t);
	memory[-2] = 0;
	__atomic_sub_fetch(&heap_used, memory[-1], __ATOMIC_RELAXED);
	free(memory - 2);
}
