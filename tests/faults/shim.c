/* Counts the system calls of a process that change the files below one folder, makes one of them fail or the last one,
 * and records them. Preloaded (LD_PRELOAD). fault_shim.py has the other side of the control file, which this maps.
 *
 * The calls go to the kernel directly, so nothing here depends on the order of libraries. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind { OPEN, WRITE, FSYNC, RENAME, MKDIR, UNLINK, RMDIR, SYMLINK, LINK, MMAP, TRUNCATE, FLOCK, READ, KINDS };
enum { ANY = -1, KILL = -9 };

struct control {
    char folder[1024]; /* absolute, without a slash at the end */
    char hit[1024];    /* path of the call that failed */
    int32_t kind;      /* of the call that fails; ANY counts all kinds but READ */
    int32_t action;    /* errno, or KILL; 0 only counts */
    int64_t at;        /* number of the call that fails, from 1 */
    int32_t lasting;   /* the calls of this kind behind it fail as well */
    int32_t recording; /* append each call to the log */
    int64_t fired;
    int64_t total;
    int64_t counts[KINDS];
};

static struct control *control;
static int record_file = -1;
static pthread_mutex_t order = PTHREAD_MUTEX_INITIALIZER; /* while recording, one call at a time */

static int real_open(int folder, const char *path, int flags, mode_t mode) {
    return (int)syscall(SYS_openat, folder, path, flags, mode);
}

/* Map a control file; all processes that map it count together. */
int attach_control(const char *path) {
    int file = real_open(AT_FDCWD, path, O_RDWR | O_CLOEXEC, 0);
    if (file < 0) return -1;
    void *place = (void *)syscall(SYS_mmap, NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (place == MAP_FAILED) return -1;
    struct control *mapped = place;
    if (mapped->recording) {
        char log[PATH_MAX];
        snprintf(log, sizeof log, "%s.log", path);
        record_file = real_open(AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    }
    control = mapped;
    return 0;
}

__attribute__((constructor)) static void start(void) {
    const char *path = getenv("FAULT_CONTROL"); /* for processes that the command starts */
    if (path != NULL) attach_control(path);
}

/* -- paths -------------------------------------------------------------------------------------------------------- */

static int of_descriptor(int descriptor, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return 1;
}

static int inside(const char *path) {
    size_t length = strlen(control->folder);
    return strncmp(path, control->folder, length) == 0 && (path[length] == 0 || path[length] == '/');
}

/* Whether a call concerns the folder; its absolute path. errno stays. */
static int concerns(int folder, const char *name, char *path) {
    if (control == NULL || name == NULL) return 0;
    int saved = errno, found = 1;
    if (name[0] == '/') {
        found = snprintf(path, PATH_MAX, "%s", name) < PATH_MAX;
    } else {
        char base[PATH_MAX];
        if (folder == AT_FDCWD) found = syscall(SYS_getcwd, base, sizeof base) > 0;
        else found = of_descriptor(folder, base);
        if (found) found = snprintf(path, PATH_MAX, "%s/%s", base, name) < PATH_MAX;
    }
    errno = saved;
    return found && inside(path);
}

static int concerns_descriptor(int descriptor, char *path) {
    if (control == NULL || descriptor < 0) return 0;
    int saved = errno, found = of_descriptor(descriptor, path) && inside(path);
    errno = saved;
    return found;
}

/* -- faults ------------------------------------------------------------------------------------------------------- */

/* Count a call. Return 0, an errno, or KILL. */
static int fault(enum kind kind, const char *path) {
    int64_t number = __atomic_add_fetch(&control->counts[kind], 1, __ATOMIC_SEQ_CST);
    int64_t total = kind == READ ? 0 : __atomic_add_fetch(&control->total, 1, __ATOMIC_SEQ_CST);
    if (control->kind == ANY) number = total;
    else if (control->kind != (int32_t)kind) return 0;
    if (control->action == 0 || number == 0) return 0;
    if (number != control->at && !(control->lasting && number > control->at)) return 0;
    if (__atomic_add_fetch(&control->fired, 1, __ATOMIC_SEQ_CST) == 1)
        snprintf(control->hit, sizeof control->hit, "%s", path);
    return control->action;
}

static void die(void) {
    syscall(SYS_kill, getpid(), SIGKILL);
    for (;;) pause();
}

/* Fail if this call is chosen. */
#define FAIL(kind, path, failed)                       \
    do {                                               \
        int error_ = fault(kind, path);                \
        if (error_ == KILL) die();                     \
        if (error_ > 0) { errno = error_; return failed; } \
    } while (0)

/* -- recording ---------------------------------------------------------------------------------------------------- */

static void begin(void) { if (control->recording) pthread_mutex_lock(&order); }

static void append(enum kind kind, const char *path, const char *other, int64_t offset, const void *data, uint64_t size) {
    if (record_file < 0) return;
    struct { uint32_t kind, path, other, unused; int64_t offset; uint64_t size; } head =
        {kind, (uint32_t)strlen(path), (uint32_t)strlen(other), 0, offset, size};
    struct iovec parts[] = {
        {&head, sizeof head}, {(void *)path, head.path}, {(void *)other, head.other}, {(void *)data, size}};
    if (syscall(SYS_writev, record_file, parts, 4) < 0) abort();
}

static void end(int done, enum kind kind, const char *path, const char *other, int64_t offset, const void *data,
                uint64_t size) {
    if (!control->recording) return;
    int saved = errno;
    if (done) append(kind, path, other, offset, data, size);
    pthread_mutex_unlock(&order);
    errno = saved;
}

/* Note something in the record, such as the end of a publication. */
void mark(const char *name) {
    if (control == NULL || !control->recording) return;
    begin();
    end(1, KINDS, name, "", 0, "", 0);
}

/* -- open --------------------------------------------------------------------------------------------------------- */

static int opened(int folder, const char *name, int flags, mode_t mode) {
    char path[PATH_MAX];
    if (!concerns(folder, name, path)) return real_open(folder, name, flags, mode);
    if (!(flags & (O_WRONLY | O_RDWR | O_CREAT))) {
        FAIL(READ, path, -1);
        return real_open(folder, name, flags, mode);
    }
    FAIL(OPEN, path, -1);
    begin();
    int file = real_open(folder, name, flags, mode);
    end(file >= 0, OPEN, path, flags & O_TRUNC ? "truncate" : "", flags, "", 0);
    return file;
}

#define MODE(flags)                                     \
    mode_t mode = 0;                                    \
    if ((flags) & (O_CREAT | __O_TMPFILE)) {            \
        va_list rest;                                   \
        va_start(rest, flags);                          \
        mode = (mode_t)va_arg(rest, int);               \
        va_end(rest);                                   \
    }

int open(const char *name, int flags, ...) { MODE(flags) return opened(AT_FDCWD, name, flags, mode); }
int open64(const char *name, int flags, ...) { MODE(flags) return opened(AT_FDCWD, name, flags, mode); }
int openat(int folder, const char *name, int flags, ...) { MODE(flags) return opened(folder, name, flags, mode); }
int openat64(int folder, const char *name, int flags, ...) { MODE(flags) return opened(folder, name, flags, mode); }
int __open_2(const char *name, int flags) { return opened(AT_FDCWD, name, flags, 0); }
int __open64_2(const char *name, int flags) { return opened(AT_FDCWD, name, flags, 0); }
int __openat_2(int folder, const char *name, int flags) { return opened(folder, name, flags, 0); }
int __openat64_2(int folder, const char *name, int flags) { return opened(folder, name, flags, 0); }
int creat(const char *name, mode_t mode) { return opened(AT_FDCWD, name, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int creat64(const char *name, mode_t mode) { return opened(AT_FDCWD, name, O_CREAT | O_WRONLY | O_TRUNC, mode); }

/* -- data --------------------------------------------------------------------------------------------------------- */

/* Write at `offset`, or at the file's position if it is negative. A kill leaves half of the data. */
static ssize_t written(int file, const void *data, size_t size, off_t offset) {
    char path[PATH_MAX];
    if (!concerns_descriptor(file, path))
        return offset < 0 ? syscall(SYS_write, file, data, size) : syscall(SYS_pwrite64, file, data, size, offset);
    int error = fault(WRITE, path);
    if (error == KILL) {
        if (offset < 0) syscall(SYS_write, file, data, size / 2);
        else syscall(SYS_pwrite64, file, data, size / 2, offset);
        die();
    }
    if (error > 0) { errno = error; return -1; }
    begin();
    ssize_t done = offset < 0 ? syscall(SYS_write, file, data, size) : syscall(SYS_pwrite64, file, data, size, offset);
    off_t from = offset;
    if (control->recording && done > 0 && offset < 0) from = syscall(SYS_lseek, file, 0, SEEK_CUR) - done;
    end(done > 0, WRITE, path, "", from, data, done > 0 ? (uint64_t)done : 0);
    return done;
}

ssize_t write(int file, const void *data, size_t size) { return written(file, data, size, -1); }
ssize_t pwrite(int file, const void *data, size_t size, off_t offset) { return written(file, data, size, offset); }
ssize_t pwrite64(int file, const void *data, size_t size, off64_t offset) { return written(file, data, size, offset); }

ssize_t writev(int file, const struct iovec *parts, int count) {
    char path[PATH_MAX];
    if (!concerns_descriptor(file, path)) return syscall(SYS_writev, file, parts, count);
    for (int each = 0; each < count; each++)
        if (parts[each].iov_len) return written(file, parts[each].iov_base, parts[each].iov_len, -1); /* a short write */
    return 0;
}

static ssize_t sent(int to, int from, off_t *offset, size_t size) {
    char path[PATH_MAX];
    if (concerns_descriptor(to, path)) {
        if (control->recording) { errno = ENOSYS; return -1; } /* the caller reads and writes instead */
        FAIL(WRITE, path, -1);
    }
    return syscall(SYS_sendfile, to, from, offset, size);
}

ssize_t sendfile(int to, int from, off_t *offset, size_t size) { return sent(to, from, offset, size); }
ssize_t sendfile64(int to, int from, off64_t *offset, size_t size) { return sent(to, from, (off_t *)offset, size); }

static int synced(int file, long call) {
    char path[PATH_MAX];
    if (!concerns_descriptor(file, path)) return (int)syscall(call, file);
    FAIL(FSYNC, path, -1);
    begin();
    end(1, FSYNC, path, "", 0, "", 0);
    return 0; /* without syncing: tests kill processes, and compute the states after a power cut */
}

int fsync(int file) { return synced(file, SYS_fsync); }
int fdatasync(int file) { return synced(file, SYS_fdatasync); }

static int truncated(int file, off_t size) {
    char path[PATH_MAX];
    if (!concerns_descriptor(file, path)) return (int)syscall(SYS_ftruncate, file, size);
    FAIL(TRUNCATE, path, -1);
    begin();
    int done = (int)syscall(SYS_ftruncate, file, size);
    end(done == 0, TRUNCATE, path, "", size, "", 0);
    return done;
}

int ftruncate(int file, off_t size) { return truncated(file, size); }
int ftruncate64(int file, off64_t size) { return truncated(file, size); }

static void *mapped(void *at, size_t size, int protection, int flags, int file, off_t offset) {
    char path[PATH_MAX];
    if (!(flags & MAP_ANONYMOUS) && concerns_descriptor(file, path)) {
        FAIL(MMAP, path, MAP_FAILED);
        begin();
        end(1, MMAP, path, protection & PROT_WRITE && flags & MAP_SHARED ? "written" : "", offset, "", 0);
    }
    return (void *)syscall(SYS_mmap, at, size, protection, flags, file, offset);
}

void *mmap(void *at, size_t size, int protection, int flags, int file, off_t offset) {
    return mapped(at, size, protection, flags, file, offset);
}
void *mmap64(void *at, size_t size, int protection, int flags, int file, off64_t offset) {
    return mapped(at, size, protection, flags, file, offset);
}

int flock(int file, int operation) {
    char path[PATH_MAX];
    if (concerns_descriptor(file, path)) FAIL(FLOCK, path, -1);
    return (int)syscall(SYS_flock, file, operation);
}

/* -- names -------------------------------------------------------------------------------------------------------- */

static int renamed(int from_folder, const char *from, int to_folder, const char *to, unsigned flags) {
    char source[PATH_MAX], target[PATH_MAX];
    int leaves = concerns(from_folder, from, source), arrives = concerns(to_folder, to, target);
    if (!leaves && !arrives) return (int)syscall(SYS_renameat2, from_folder, from, to_folder, to, flags);
    FAIL(RENAME, arrives ? target : source, -1);
    begin();
    int done = (int)syscall(SYS_renameat2, from_folder, from, to_folder, to, flags);
    end(done == 0, RENAME, source, target, 0, "", 0);
    return done;
}

int rename(const char *from, const char *to) { return renamed(AT_FDCWD, from, AT_FDCWD, to, 0); }
int renameat(int from_folder, const char *from, int to_folder, const char *to) {
    return renamed(from_folder, from, to_folder, to, 0);
}
int renameat2(int from_folder, const char *from, int to_folder, const char *to, unsigned flags) {
    return renamed(from_folder, from, to_folder, to, flags);
}

int mkdirat(int folder, const char *name, mode_t mode) {
    char path[PATH_MAX];
    if (!concerns(folder, name, path)) return (int)syscall(SYS_mkdirat, folder, name, mode);
    FAIL(MKDIR, path, -1);
    begin();
    int done = (int)syscall(SYS_mkdirat, folder, name, mode);
    end(done == 0, MKDIR, path, "", 0, "", 0);
    return done;
}
int mkdir(const char *name, mode_t mode) { return mkdirat(AT_FDCWD, name, mode); }

int unlinkat(int folder, const char *name, int flags) {
    char path[PATH_MAX];
    if (!concerns(folder, name, path)) return (int)syscall(SYS_unlinkat, folder, name, flags);
    enum kind kind = flags & AT_REMOVEDIR ? RMDIR : UNLINK;
    FAIL(kind, path, -1);
    begin();
    int done = (int)syscall(SYS_unlinkat, folder, name, flags);
    end(done == 0, kind, path, "", 0, "", 0);
    return done;
}
int unlink(const char *name) { return unlinkat(AT_FDCWD, name, 0); }
int rmdir(const char *name) { return unlinkat(AT_FDCWD, name, AT_REMOVEDIR); }
int remove(const char *name) {
    int done = unlinkat(AT_FDCWD, name, 0);
    return done && errno == EISDIR ? unlinkat(AT_FDCWD, name, AT_REMOVEDIR) : done;
}

int symlinkat(const char *to, int folder, const char *name) {
    char path[PATH_MAX];
    if (!concerns(folder, name, path)) return (int)syscall(SYS_symlinkat, to, folder, name);
    FAIL(SYMLINK, path, -1);
    begin();
    int done = (int)syscall(SYS_symlinkat, to, folder, name);
    end(done == 0, SYMLINK, path, to, 0, "", 0);
    return done;
}
int linkat(int from_folder, const char *from, int to_folder, const char *to, int flags) {
    char source[PATH_MAX], target[PATH_MAX];
    if (!concerns(to_folder, to, target) || !concerns(from_folder, from, source))
        return (int)syscall(SYS_linkat, from_folder, from, to_folder, to, flags);
    FAIL(LINK, target, -1);
    begin();
    int done = (int)syscall(SYS_linkat, from_folder, from, to_folder, to, flags);
    end(done == 0, LINK, source, target, 0, "", 0);
    return done;
}
int link(const char *from, const char *to) { return linkat(AT_FDCWD, from, AT_FDCWD, to, 0); }

int symlink(const char *to, const char *name) { return symlinkat(to, AT_FDCWD, name); }
