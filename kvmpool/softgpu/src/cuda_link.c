/* The linker of the driver API: its inputs are kept and become, complete, an image of our own that a module is loaded from.
 *
 * That image is an ELF file, as a cubin is, so that programs can measure it. Its one section holds: LINKED_MAGIC, total bytes
 * of the section, number of inputs, then each input's size and bytes, padded to 8.
 */
#include "cuda_core.h"

#include <elf.h>
#include <stdlib.h>
#include <string.h>

#define MAX_INPUTS 64
#define MAX_INPUT_BYTES (64ull << 20)
#define LINKED_MAGIC 0x314b4e494c554753ull /* "SGULINK1" */

struct sg_link {
	unsigned count;
	char *images[MAX_INPUTS];
	size_t sizes[MAX_INPUTS];
	char *linked; /* the complete image, until destroyed */
};

static const uint64_t *section_of(const void *image)
{
	return (const uint64_t *)(const void *)((const char *)image + sizeof(Elf64_Ehdr));
}

bool sg_is_linked(const void *image)
{
	const char *text = image; /* maybe a short PTX text: no byte after its end is looked at */

	for (size_t i = 0; i < SELFMAG; i++)
		if (text[i] != ELFMAG[i])
			return false;
	if (section_of(image)[0] != LINKED_MAGIC) /* any ELF file has bytes behind its header */
		return false;
	Elf64_Ehdr elf;
	memcpy(&elf, image, sizeof(elf));
	return elf.e_shoff == sizeof(elf) + section_of(image)[1]; /* who measures the file by its headers measured ours */
}

CUresult sg_copy_linked(const void *image, char **copy, size_t *size)
{
	*size = section_of(image)[1];
	if (*size > MAX_INPUTS * (MAX_INPUT_BYTES + 16))
		return CUDA_ERROR_INVALID_IMAGE;
	*size += sizeof(Elf64_Ehdr);
	*copy = malloc(*size);
	if (!*copy)
		return CUDA_ERROR_OUT_OF_MEMORY;
	memcpy(*copy, image, *size);
	return CUDA_SUCCESS;
}

CUresult sg_load_linked(const void *image, struct kp_module **out, char *log, size_t log_size)
{
	const uint64_t *word = section_of(image);
	const void *images[MAX_INPUTS];
	size_t sizes[MAX_INPUTS];
	uint64_t total = word[1], count = word[2], at = 3;

	if (!count || count > MAX_INPUTS || total > MAX_INPUTS * (MAX_INPUT_BYTES + 16))
		return CUDA_ERROR_INVALID_IMAGE;
	for (uint64_t i = 0; i < count; i++) {
		if (at * 8 + 8 > total || word[at] > total - at * 8 - 8)
			return CUDA_ERROR_INVALID_IMAGE;
		sizes[i] = word[at];
		images[i] = &word[at + 1];
		at += 1 + (sizes[i] + 8) / 8;
	}
	return kp_module_link(images, sizes, count, out, log, log_size);
}

CU_API CUresult cuLinkCreate_v2(unsigned count, int *options, void **values, CUlinkState *out)
{
	SG_ENTER(context);
	(void)context;
	(void)count;
	(void)options;
	(void)values;
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	struct sg_link *link = calloc(1, sizeof(*link));
	if (!link)
		return CUDA_ERROR_OUT_OF_MEMORY;
	sg_live_add(SG_LINK, link);
	*out = link;
	return CUDA_SUCCESS;
}

static CUresult add(CUlinkState link, const void *data, size_t size)
{
	SG_ENTER(context);
	(void)context;
	if (!sg_live(SG_LINK, link))
		return CUDA_ERROR_INVALID_HANDLE;
	if (!data || !size || size > MAX_INPUT_BYTES || link->count == MAX_INPUTS)
		return CUDA_ERROR_INVALID_VALUE;
	char *copy = calloc(1, size + 1);
	if (!copy)
		return CUDA_ERROR_OUT_OF_MEMORY;
	link->images[link->count] = memcpy(copy, data, size);
	link->sizes[link->count++] = size;
	return CUDA_SUCCESS;
}

CU_API CUresult cuLinkAddData_v2(CUlinkState link, int type, void *data, size_t size, const char *name, unsigned count, int *options,
				 void **values)
{
	(void)type;
	(void)name;
	(void)count;
	(void)options;
	(void)values;
	return add(link, data, size);
}

CU_API CUresult cuLinkAddFile_v2(CUlinkState link, int type, const char *path, unsigned count, int *options, void **values)
{
	char *data;
	size_t size;

	(void)type;
	(void)count;
	(void)options;
	(void)values;
	SG_TRY(sg_read_file(path, &data, &size));
	CUresult rc = add(link, data, size);
	free(data);
	return rc;
}

/* Does it link? Errors belong here, not to the load that follows. */
static CUresult try_link(const struct sg_link *link)
{
	const void *images[MAX_INPUTS];
	struct kp_module *module;

	for (unsigned i = 0; i < link->count; i++)
		images[i] = link->images[i];
	SG_TRY(kp_module_link(images, link->sizes, link->count, &module, NULL, 0));
	kp_module_unload(module);
	return CUDA_SUCCESS;
}

/* ELF header, section, section headers (the empty one and ours). */
static size_t file_bytes(size_t section)
{
	return sizeof(Elf64_Ehdr) + section + 2 * sizeof(Elf64_Shdr);
}

static void write_headers(char *file, size_t section)
{
	const Elf64_Ehdr elf = {.e_ident = {ELFMAG0, ELFMAG1, ELFMAG2, ELFMAG3, ELFCLASS64, ELFDATA2LSB, EV_CURRENT},
				.e_type = ET_EXEC, .e_machine = 190 /* EM_CUDA */, .e_version = EV_CURRENT,
				.e_shoff = sizeof(elf) + section, .e_ehsize = sizeof(elf), .e_shentsize = sizeof(Elf64_Shdr), .e_shnum = 2};
	const Elf64_Shdr header = {.sh_type = SHT_PROGBITS, .sh_offset = sizeof(elf), .sh_size = section, .sh_addralign = 8};

	memcpy(file, &elf, sizeof(elf));
	memcpy(file + elf.e_shoff + sizeof(header), &header, sizeof(header));
}

CU_API CUresult cuLinkComplete(CUlinkState link, void **image, size_t *size)
{
	size_t words = 3, at = 3;

	SG_ENTER(context);
	(void)context;
	if (!sg_live(SG_LINK, link))
		return CUDA_ERROR_INVALID_HANDLE;
	if (!image || !link->count)
		return CUDA_ERROR_INVALID_VALUE;
	SG_TRY(try_link(link));
	for (unsigned i = 0; i < link->count; i++)
		words += 1 + (link->sizes[i] + 8) / 8; /* with a NUL at least */
	char *file = calloc(1, file_bytes(words * 8));
	if (!file)
		return CUDA_ERROR_OUT_OF_MEMORY;
	write_headers(file, words * 8);
	uint64_t *linked = (uint64_t *)(void *)(file + sizeof(Elf64_Ehdr));
	linked[0] = LINKED_MAGIC;
	linked[1] = words * 8;
	linked[2] = link->count;
	for (unsigned i = 0; i < link->count; i++) {
		linked[at] = link->sizes[i];
		memcpy(&linked[at + 1], link->images[i], link->sizes[i]);
		at += 1 + (link->sizes[i] + 8) / 8;
	}
	free(link->linked);
	link->linked = file;
	*image = file;
	if (size)
		*size = file_bytes(words * 8);
	return CUDA_SUCCESS;
}

CU_API CUresult cuLinkDestroy(CUlinkState link)
{
	SG_TRY(sg_ready());
	if (!sg_live(SG_LINK, link))
		return CUDA_ERROR_INVALID_HANDLE;
	sg_live_remove(link);
	for (unsigned i = 0; i < link->count; i++)
		free(link->images[i]);
	free(link->linked);
	free(link);
	return CUDA_SUCCESS;
}

CU_API CUresult cuLinkCreate(unsigned count, int *options, void **values, CUlinkState *out)
{
	return cuLinkCreate_v2(count, options, values, out);
}

CU_API CUresult cuLinkAddData(CUlinkState link, int type, void *data, size_t size, const char *name, unsigned count, int *options,
			      void **values)
{
	return cuLinkAddData_v2(link, type, data, size, name, count, options, values);
}

CU_API CUresult cuLinkAddFile(CUlinkState link, int type, const char *path, unsigned count, int *options, void **values)
{
	return cuLinkAddFile_v2(link, type, path, count, options, values);
}
