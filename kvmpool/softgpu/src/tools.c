/* Where the translator and the cache are, and the name under which a compiled kernel is kept. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "module.h"

#define DEFAULT_ROOT "/run/kvmpool-softgpu"

void kp_log(struct kp_log *log, const char *format, ...)
{
	va_list list;

	if (!log || !log->text || log->used + 1 >= log->size)
		return;
	va_start(list, format);
	const int n = vsnprintf(log->text + log->used, log->size - log->used, format, list);
	va_end(list);
	if (n > 0)
		log->used = log->used + (size_t)n < log->size ? log->used + (size_t)n : log->size - 1;
}

/* ---- where things are ---- */

int kp_path_join(char out[KP_PATH], const char *folder, const char *name)
{
	return snprintf(out, KP_PATH, "%s/%s", folder, name) < KP_PATH ? 0 : -ENAMETOOLONG;
}

/* The folder with translate.py and src/rt.h: an override, next to this library in a wheel or build tree, the sources. */
int kp_tools_folder(char out[KP_PATH], struct kp_log *log)
{
	static const char *const beside[] = {"../../softgpu", "../../../kvmpool/softgpu"};
	const char *named = getenv("KVMPOOL_SOFTGPU_TRANSLATOR");
	char file[KP_PATH];
	Dl_info info;

	if (named && *named) {
		snprintf(out, KP_PATH, "%s", named);
		char *slash = strrchr(out, '/');

		if (slash && strcmp(slash, "/translate.py") == 0)
			*slash = 0;
		if (!kp_path_join(file, out, "translate.py") && !access(file, R_OK))
			return 0;
		kp_log(log, "KVMPOOL_SOFTGPU_TRANSLATOR names no translate.py: %s", named);
		return KP_JIT_COMPILER_NOT_FOUND;
	}
	for (size_t i = 0; i < sizeof(beside) / sizeof(beside[0]); i++) {
		char real[KP_PATH];

		if (!dladdr((void *)&kp_log, &info) || !realpath(info.dli_fname, real) || !strrchr(real, '/'))
			break;
		*strrchr(real, '/') = 0;
		if (!kp_path_join(out, real, beside[i]) && !kp_path_join(file, out, "translate.py") && !access(file, R_OK))
			return 0;
	}
#ifdef KP_TRANSLATOR_SOURCE
	snprintf(out, KP_PATH, "%s", KP_TRANSLATOR_SOURCE);
	if (!kp_path_join(file, out, "translate.py") && !access(file, R_OK))
		return 0;
#endif
	kp_log(log, "the software GPU's translate.py is not beside libcuda.so.1. Next: set KVMPOOL_SOFTGPU_TRANSLATOR to it");
	return KP_JIT_COMPILER_NOT_FOUND;
}

static int usable_folder(const char *path)
{
	struct stat status;

	if (mkdir(path, 0700) && errno != EEXIST)
		return 0;
	/* what is loaded from here runs in this process: nobody else may be able to write it */
	return !stat(path, &status) && S_ISDIR(status.st_mode) && (status.st_uid == geteuid() || status.st_uid == 0) &&
	       !(status.st_mode & 002) && !access(path, W_OK | X_OK);
}

int kp_cache_folder(char out[KP_PATH], struct kp_log *log)
{
	const char *root = getenv("KVMPOOL_SOFTGPU");
	const char *temporary = getenv("TMPDIR");
	char mine[KP_PATH];

	if (!root || !*root)
		root = DEFAULT_ROOT;
	(void)mkdir(root, 0755);
	if (!kp_path_join(out, root, "cache") && usable_folder(out))
		return 0;
	if (!temporary || !*temporary)
		temporary = "/tmp";
	const int n = snprintf(mine, sizeof(mine), "%s/kvmpool-softgpu-%u", temporary, (unsigned)geteuid());

	if (n < KP_PATH && usable_folder(mine)) {
		snprintf(out, KP_PATH, "%s", mine);
		return 0;
	}
	kp_log(log, "no folder for compiled kernels: neither %s/cache nor %s can be written. Next: set KVMPOOL_SOFTGPU", root, mine);
	return KP_JIT_COMPILER_NOT_FOUND;
}

/* ---- the key ---- */

const char *kp_cpu_flags(void)
{
#if defined(__x86_64__)
	if (__builtin_cpu_supports("fma") && __builtin_cpu_supports("popcnt"))
		return "-mfma -mpopcnt -msse4.1";
#endif
	return "";
}

static void add_file(struct kp_sha256 *hash, const char *path)
{
	char buffer[16384];
	const int file = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t n;

	if (file < 0)
		return;
	while ((n = read(file, buffer, sizeof(buffer))) > 0)
		kp_sha256_add(hash, buffer, (size_t)n);
	close(file);
}

static int is_tool(const struct dirent *entry)
{
	const char *dot = strrchr(entry->d_name, '.');

	if (!dot)
		return 0;
	return (!strcmp(dot, ".py") && (!strncmp(entry->d_name, "ptx_", 4) || !strcmp(entry->d_name, "translate.py"))) ||
	       (!strcmp(dot, ".h") && !strncmp(entry->d_name, "rt", 2));
}

/* Hashes the translator and the headers, so that an upgrade never meets kernels of the version before. */
static void add_tools(struct kp_sha256 *hash, const char *tools)
{
	static const char *const folders[] = {".", "src"};

	for (int i = 0; i < 2; i++) {
		struct dirent **names = NULL;
		char folder[KP_PATH], path[KP_PATH];

		if (kp_path_join(folder, tools, folders[i]))
			return;
		const int count = scandir(folder, &names, is_tool, alphasort);

		for (int j = 0; j < count; j++) {
			if (!kp_path_join(path, folder, names[j]->d_name))
				add_file(hash, path);
			free(names[j]);
		}
		free(names);
	}
}

void kp_build_key(const char *tools, const char *const *ptx, const size_t *lens, size_t count, char hex[65])
{
	static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
	static struct kp_sha256 start; /* the tools' part: the same for the life of the process */
	static char hashed[KP_PATH];
	struct kp_sha256 hash;

	pthread_mutex_lock(&lock);
	if (strcmp(hashed, tools)) {
		kp_sha256_start(&start);
		add_tools(&start, tools);
		kp_sha256_add(&start, kp_cpu_flags(), strlen(kp_cpu_flags()));
		snprintf(hashed, sizeof(hashed), "%s", tools);
	}
	hash = start;
	pthread_mutex_unlock(&lock);
	for (size_t i = 0; i < count; i++) {
		kp_sha256_add(&hash, &lens[i], sizeof(lens[i]));
		kp_sha256_add(&hash, ptx[i], lens[i]);
	}
	kp_sha256_hex(&hash, hex);
}
