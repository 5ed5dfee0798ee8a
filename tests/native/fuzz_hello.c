/* Any bytes as the body of a hello, a welcome or figures: what passes its check has terminated texts and values in range. */
#define _GNU_SOURCE
#include <stdlib.h>

#include "../../kvmpool/dataplane/src/frame.c"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void must_be_text(const char *text, size_t room)
{
    size_t length = strnlen(text, room);

    if (length == room)
        abort();
    for (size_t i = 0; i < length; i++)
        if (text[i] < 0x20 || text[i] > 0x7e)
            abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct kp_hello hello;
    struct kp_welcome welcome;
    struct kp_figures figures;

    if (kp_hello_check(data, size, &hello) == 0) {
        must_be_text(hello.claim, sizeof hello.claim);
        must_be_text(hello.token, sizeof hello.token);
        must_be_text(hello.program, sizeof hello.program);
        if (hello.claim[0] == 0 || strpbrk(hello.claim, "/. #'\"") != NULL || hello.wire_version != KP_WIRE_VERSION)
            abort();
        if (hello.va_base % KP_VA_PAGE != 0 || hello.va_base + KP_VA_WINDOW > KP_VA_MAX)
            abort();
    }
    if (kp_welcome_check(data, size, &welcome) == 0) {
        must_be_text(welcome.pci, sizeof welcome.pci);
        must_be_text(welcome.text, sizeof welcome.text);
        if (welcome.status > 0)
            abort();
    }
    if (kp_figures_check(data, size, &figures) == 0) {
        must_be_text(figures.name, sizeof figures.name);
        must_be_text(figures.driver, sizeof figures.driver);
        if (figures.processes > KP_FIGURE_PROCESSES || figures.cuda_version < 0)
            abort();
    }
    return 0;
}
