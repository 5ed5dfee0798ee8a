/* Containers of code from a guest, before the driver sees them: it is told no length, so it believes the container's own.
 *
 * Nothing in a container may reach beyond what was sent, and it may hold no pointer: a guest's mean nothing here. What is in
 * it is the driver's to judge.
 */
#include "session_state.h"

#include <elf.h>
#include <string.h>

#define WRAPPER_MAGIC 0x466243b1u /* points at a fatbin; the shim sends what it points at */
#define FATBIN_MAGIC 0xba55ed50u
#define ENTRIES_MAX 65536u

struct fatbin {
    uint32_t magic;
    uint16_t version, header_bytes;
    uint64_t bytes; /* of all entries */
};

struct entry {
    uint16_t kind, version;
    uint32_t header_bytes;
    uint64_t bytes; /* of the payload with its padding */
    uint32_t compressed, options;
};

static bool within(uint64_t offset, uint64_t count, uint64_t each, uint64_t bytes)
{
    uint64_t length;

    return !__builtin_mul_overflow(count, each, &length) && length <= bytes && offset <= bytes - length;
}

static bool is_elf(const unsigned char *image, uint64_t bytes)
{
    return bytes >= SELFMAG && memcmp(image, ELFMAG, SELFMAG) == 0;
}

static bool elf_fits(const unsigned char *image, uint64_t bytes)
{
    Elf64_Ehdr elf;
    Elf64_Shdr section;
    Elf64_Phdr program;

    if (bytes < sizeof elf)
        return false;
    memcpy(&elf, image, sizeof elf);
    if (elf.e_ident[EI_CLASS] != ELFCLASS64 || (elf.e_shnum > 0 && elf.e_shentsize != sizeof section) ||
        (elf.e_phnum > 0 && elf.e_phentsize != sizeof program) || !within(elf.e_shoff, elf.e_shnum, sizeof section, bytes) ||
        !within(elf.e_phoff, elf.e_phnum, sizeof program, bytes))
        return false;
    for (unsigned i = 0; i < elf.e_shnum; i++) {
        memcpy(&section, image + elf.e_shoff + i * sizeof section, sizeof section);
        if (section.sh_type != SHT_NOBITS && !within(section.sh_offset, section.sh_size, 1, bytes))
            return false;
    }
    for (unsigned i = 0; i < elf.e_phnum; i++) {
        memcpy(&program, image + elf.e_phoff + i * sizeof program, sizeof program);
        if (!within(program.p_offset, program.p_filesz, 1, bytes))
            return false;
    }
    return true;
}

static bool fatbin_fits(const unsigned char *image, uint64_t bytes)
{
    struct fatbin header;
    struct entry entry;

    if (bytes < sizeof header)
        return false;
    memcpy(&header, image, sizeof header);
    if (header.header_bytes < sizeof header || !within(header.header_bytes, header.bytes, 1, bytes))
        return false;
    image += header.header_bytes;
    bytes = header.bytes;
    for (unsigned i = 0; bytes > 0; i++) {
        if (i == ENTRIES_MAX || bytes < sizeof entry)
            return false;
        memcpy(&entry, image, sizeof entry);
        if (entry.header_bytes < sizeof entry || !within(entry.header_bytes, entry.bytes, 1, bytes) || entry.compressed > entry.bytes)
            return false;
        image += entry.header_bytes;
        if (is_elf(image, entry.bytes) && !elf_fits(image, entry.bytes))
            return false;
        image += entry.bytes;
        bytes -= entry.header_bytes + entry.bytes;
    }
    return true;
}

CUresult kp_container_check(const unsigned char *image, uint64_t bytes)
{
    uint32_t magic = 0;
    bool fits = true; /* a text ends where kp_image_take has put an end */

    memcpy(&magic, image, bytes < sizeof magic ? bytes : sizeof magic);
    if (magic == WRAPPER_MAGIC)
        fits = false;
    else if (magic == FATBIN_MAGIC)
        fits = fatbin_fits(image, bytes);
    else if (is_elf(image, bytes))
        fits = elf_fits(image, bytes);
    return fits ? CUDA_SUCCESS : CUDA_ERROR_INVALID_IMAGE;
}
