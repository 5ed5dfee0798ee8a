/*
 * PTX texts to a shared library: the translator (Python) writes C, gcc compiles it, the result is kept under the hash of
 * all that went in. A cache entry appears by rename, so any number of processes may build the same one at once.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "module.h"

#define MAX_TEXTS 64
#define REFUSED 3 /* translate.py's exit code for PTX it does not take */
#define COMPILER_ARGS 48

extern char **environ;

/* ---- running programs ---- */

/* Exit status of the program, or -1 where it does not start. What it writes to stderr goes to the file `errors`. */
static int run(char *const argv[], const char *errors)
{
	posix_spawn_file_actions_t actions;
	posix_spawnattr_t attributes;
	sigset_t none;
	pid_t pid;
	int status = 0;

	posix_spawn_file_actions_init(&actions);
	posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
	posix_spawn_file_actions_addopen(&actions, 1, "/dev/null", O_WRONLY, 0);
	posix_spawn_file_actions_addopen(&actions, 2, errors, O_WRONLY | O_CREAT | O_TRUNC, 0600);
	posix_spawnattr_init(&attributes);
	sigemptyset(&none);
	posix_spawnattr_setsigmask(&attributes, &none);
	posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
	const int error = posix_spawnp(&pid, argv[0], &actions, &attributes, argv, environ);

	posix_spawn_file_actions_destroy(&actions);
	posix_spawnattr_destroy(&attributes);
	if (error)
		return -1;
	while (waitpid(pid, &status, 0) < 0) {
		if (errno == ECHILD)
			return 0; /* the program ignores SIGCHLD: what was written tells how it went */
		if (errno != EINTR)
			return -1;
	}
	if (WIFEXITED(status))
		return WEXITSTATUS(status) == 127 ? -1 : WEXITSTATUS(status);
	return 128;
}

static void first_line(const char *path, char *out, size_t size)
{
	FILE *file = fopen(path, "re");

	out[0] = 0;
	if (!file)
		return;
	if (!fgets(out, (int)size, file))
		out[0] = 0;
	out[strcspn(out, "\n")] = 0;
	fclose(file);
}

static void last_line(const char *path, char *out, size_t size)
{
	FILE *file = fopen(path, "re");
	char line[400];

	out[0] = 0;
	while (file && fgets(line, sizeof(line), file)) {
		line[strcspn(line, "\n")] = 0;
		if (line[0])
			memcpy(out, line, size < sizeof(line) ? size : sizeof(line));
	}
	if (file)
		fclose(file);
}

/* ---- the two steps, in a folder of their own ---- */

struct work {
	const char *tools;
	char folder[KP_PATH], source[KP_PATH], library[KP_PATH], errors[KP_PATH];
	char texts[MAX_TEXTS][KP_PATH];
	size_t count;
};

static int write_file(const char *path, const char *text, size_t len)
{
	const int file = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);

	if (file < 0)
		return -errno;
	while (len) {
		const ssize_t n = write(file, text, len);

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0) {
			close(file);
			return -EIO;
		}
		text += n;
		len -= (size_t)n;
	}
	return close(file) ? -errno : 0;
}

static int translate(struct work *work, struct kp_log *log)
{
	char script[KP_PATH], line[400];
	char *argv[MAX_TEXTS + 5];
	const char *python = getenv("KVMPOOL_PYTHON");
	size_t n = 0;

	if (kp_path_join(script, work->tools, "translate.py"))
		return KP_JIT_COMPILER_NOT_FOUND;
	argv[n++] = (char *)(python && *python ? python : "python3");
	argv[n++] = (char *)"-I";
	argv[n++] = script;
	argv[n++] = work->source;
	for (size_t i = 0; i < work->count; i++)
		argv[n++] = work->texts[i];
	argv[n] = NULL;
	const int status = run(argv, work->errors);

	if (status == 0 && !access(work->source, R_OK))
		return 0;
	if (status < 0) {
		kp_log(log, "%s cannot be started; the software GPU translates PTX with it. Next: install python3 or set KVMPOOL_PYTHON",
		       argv[0]);
		return KP_JIT_COMPILER_NOT_FOUND;
	}
	if (status == REFUSED || status == 0)
		first_line(work->errors, line, sizeof(line));
	else
		last_line(work->errors, line, sizeof(line));
	kp_log(log, "%s%s", status == REFUSED || status == 0 ? "ptx " : "the translator failed: ", line);
	return KP_INVALID_PTX;
}

static int compile(struct work *work, struct kp_log *log)
{
	static const char *const fixed[] = {"-O1", "-std=gnu11", "-shared", "-fPIC", "-w", "-fvisibility=hidden", "-ffp-contract=off",
					    "-fwrapv", "-fno-strict-aliasing", "-fno-math-errno", "-fno-stack-protector",
					    "-fstack-clash-protection", "-U_FORTIFY_SOURCE"};
	const char *named = getenv("KVMPOOL_CC");
	char include[KP_PATH + 8], flags[64], line[400], *rest = NULL;
	char *argv[COMPILER_ARGS];
	size_t n = 1;

	snprintf(include, sizeof(include), "-I%s/src", work->tools);
	snprintf(flags, sizeof(flags), "%s", kp_cpu_flags());
	for (size_t i = 0; i < sizeof(fixed) / sizeof(fixed[0]); i++)
		argv[n++] = (char *)fixed[i];
	for (char *flag = strtok_r(flags, " ", &rest); flag; flag = strtok_r(NULL, " ", &rest))
		argv[n++] = flag;
	char *const last[] = {include, work->source, (char *)"-o", work->library, (char *)"-lm", NULL};

	memcpy(argv + n, last, sizeof(last));
	argv[0] = (char *)(named && *named ? named : "gcc");
	int status = run(argv, work->errors);

	if (status < 0 && !(named && *named)) {
		argv[0] = (char *)"cc";
		status = run(argv, work->errors);
	}
	if (status == 0 && !access(work->library, R_OK))
		return 0;
	if (status < 0) {
		kp_log(log, "no C compiler: neither gcc nor cc can be started. Next: apt-get install gcc, or set KVMPOOL_CC");
		return KP_JIT_COMPILER_NOT_FOUND;
	}
	first_line(work->errors, line, sizeof(line));
	kp_log(log, "the C compiler refused the translated kernel (a fault of kvmpool): %s", line);
	return KP_INVALID_PTX;
}

static void clean(struct work *work)
{
	for (size_t i = 0; i < work->count; i++)
		unlink(work->texts[i]);
	unlink(work->source);
	unlink(work->library);
	unlink(work->errors);
	rmdir(work->folder);
}

static int prepare(struct work *work, const char *cache, const char *const *ptx, const size_t *lens)
{
	if (kp_path_join(work->folder, cache, "build.XXXXXX") || !mkdtemp(work->folder))
		return -EIO;
	if (snprintf(work->source, KP_PATH, "%s/k.c", work->folder) >= KP_PATH ||
	    snprintf(work->library, KP_PATH, "%s/k.so", work->folder) >= KP_PATH ||
	    snprintf(work->errors, KP_PATH, "%s/errors", work->folder) >= KP_PATH)
		return -ENAMETOOLONG;
	for (size_t i = 0; i < work->count; i++) {
		if (snprintf(work->texts[i], KP_PATH, "%s/%zu.ptx", work->folder, i) >= KP_PATH)
			return -ENAMETOOLONG;
		if (write_file(work->texts[i], ptx[i], lens[i]))
			return -EIO;
	}
	return 0;
}

int kp_build(const char *const *ptx, const size_t *lens, size_t count, char path[KP_PATH], struct kp_log *log)
{
	char tools[KP_PATH], cache[KP_PATH], key[65], source[KP_PATH];

	if (!count || count > MAX_TEXTS)
		return KP_INVALID_VALUE;
	int error = kp_tools_folder(tools, log);

	if (!error)
		error = kp_cache_folder(cache, log);
	if (error)
		return error;
	kp_build_key(tools, ptx, lens, count, key);
	if (snprintf(path, KP_PATH, "%s/%s.so", cache, key) >= KP_PATH || snprintf(source, KP_PATH, "%s/%s.c", cache, key) >= KP_PATH)
		return KP_JIT_COMPILER_NOT_FOUND;
	if (!access(path, R_OK))
		return 0;
	struct work *work = calloc(1, sizeof(*work));

	if (!work)
		return KP_OUT_OF_MEMORY;
	work->tools = tools;
	work->count = count;
	if (prepare(work, cache, ptx, lens)) {
		kp_log(log, "cannot write to %s: %s", cache, strerror(errno));
		error = KP_JIT_COMPILER_NOT_FOUND;
	}
	if (!error)
		error = translate(work, log);
	if (!error)
		error = compile(work, log);
	if (!error) {
		rename(work->source, source); /* for gdb; nothing needs it */
		if (rename(work->library, path))
			error = KP_JIT_COMPILER_NOT_FOUND;
	}
	clean(work);
	free(work);
	return error;
}
