/*
 * fio engine: reads and writes with libmillpond.
 *
 *     fio --ioengine=external:./millpond.so --millpond_cache=1g ...
 *
 * With iodepth=1, a request is a call, as in fio's psync. With a larger depth, requests go to a queue of the library, as in
 * fio's libaio. Jobs that are threads of one process (--thread) share one cache (E1).
 *
 * fio's headers match one release, and a program that uses them must be under the GPL, version 2, as a whole. So the engine
 * is compiled where it is used (`build`), and no binary is distributed.
 */
#include "config-host.h"

#include "fio.h"
#include "optgroup.h"

#include <millpond.h>

struct options {
    void *pad; /* fio's */
    unsigned long long cache_bytes;
    unsigned int write_mode;
    unsigned int backing;
};

static struct fio_option options[] = {
    {
        .name = "millpond_cache",
        .lname = "Millpond cache",
        .help = "Memory for cached pages; the first job of a process sets it for all of its jobs",
        .type = FIO_OPT_STR_VAL,
        .off1 = offsetof(struct options, cache_bytes),
        .category = FIO_OPT_C_ENGINE,
        .group = FIO_OPT_G_INVALID,
    },
    {
        .name = "millpond_mode",
        .lname = "Millpond write mode",
        .help = "When a write reaches the kernel",
        .type = FIO_OPT_STR,
        .off1 = offsetof(struct options, write_mode),
        .def = "through",
        .posval = {
            {.ival = "through", .oval = MILLPOND_WRITE_THROUGH, .help = "Before it returns"},
            {.ival = "back", .oval = MILLPOND_WRITE_BACK, .help = "Later"},
        },
        .category = FIO_OPT_C_ENGINE,
        .group = FIO_OPT_G_INVALID,
    },
    {
        .name = "millpond_backing",
        .lname = "Millpond backing",
        .help = "How the engine accesses the file",
        .type = FIO_OPT_STR,
        .off1 = offsetof(struct options, backing),
        .def = "buffered",
        .posval = {
            {.ival = "buffered", .oval = MILLPOND_BACKING_BUFFERED, .help = "Through the kernel's cache"},
            {.ival = "direct", .oval = MILLPOND_BACKING_DIRECT, .help = "With O_DIRECT"},
        },
        .category = FIO_OPT_C_ENGINE,
        .group = FIO_OPT_G_INVALID,
    },
    {.name = NULL},
};

/* State of a job with iodepth > 1. */
struct job {
    struct millpond_queue queue;
    unsigned int pending; /* number of `requests` that commit submits */
    struct millpond_request *requests;
    struct millpond_completion *completions;
};

/* E1: the first job of a process that opens a file creates the engine; the last job destroys it. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct millpond_engine engine;
static unsigned int jobs;
static pid_t owner;

struct ioengine_ops ioengine;

static int report_error(struct thread_data *td, const char *what, int64_t result) {
    char text[256] = "";
    int error = (int)-result;
    millpond_error_text(text, sizeof text);
    log_err("fio: millpond: %s: %s\n", what, text);
    td_verror(td, error, what);
    return error;
}

/* Creates the process's engine if necessary. `lock` is held. */
static int make_engine(struct thread_data *td) {
    const struct options *wanted = td->eo;
    struct millpond_engine_options of_engine = {.size = sizeof of_engine};
    int error;
    if (owner != getpid()) { /* a forked job process, where the parent's handles are invalid */
        memset(&engine, 0, sizeof engine);
        jobs = 0;
        owner = getpid();
    }
    if (engine.id)
        return 0;
    of_engine.cache_bytes = wanted->cache_bytes;
    error = millpond_engine_create(&of_engine, &engine);
    return error ? report_error(td, "creating the cache", error) : 0;
}

/* Whether fio's structs have the layout of the headers. */
static int matches_running_fio(const struct thread_data *td) {
    return td->io_ops == &ioengine && td->eo != NULL;
}

static int job_init(struct thread_data *td) {
    unsigned int depth = td->o.iodepth;
    struct job *job;
    int error;
    if (!matches_running_fio(td)) {
        log_err("fio: millpond: this engine was built for a different version than fio %s\n", fio_version_string);
        return 1;
    }
    pthread_mutex_lock(&lock);
    error = make_engine(td);
    if (!error)
        jobs++;
    pthread_mutex_unlock(&lock);
    if (error)
        return error;
    if (depth == 1) {
        td->flags |= (unsigned long long)FIO_SYNCIO << TD_ENG_FLAG_SHIFT;
        return 0;
    }
    job = calloc(1, sizeof *job);
    td->io_ops_data = job;
    if (job) {
        job->requests = calloc(depth, sizeof *job->requests);
        job->completions = calloc(depth, sizeof *job->completions);
    }
    if (!job || !job->requests || !job->completions) {
        td_verror(td, ENOMEM, "calloc");
        return ENOMEM;
    }
    error = millpond_queue_create(engine, depth, &job->queue);
    return error ? report_error(td, "creating the queue", error) : 0;
}

static void job_cleanup(struct thread_data *td) {
    struct job *job = td->io_ops_data;
    if (job) {
        millpond_queue_destroy(job->queue);
        free(job->requests);
        free(job->completions);
        free(job);
        td->io_ops_data = NULL;
    }
    pthread_mutex_lock(&lock);
    if (owner == getpid() && jobs > 0 && --jobs == 0) {
        millpond_engine_destroy(engine);
        memset(&engine, 0, sizeof engine);
    }
    pthread_mutex_unlock(&lock);
}

/* The handle of a file, which is stored in fio's engine pointer. */
static struct millpond_file file_of(const struct fio_file *f) {
    return (struct millpond_file){.id = (uint64_t)(uintptr_t)FILE_ENG_DATA(f)};
}

static int open_file(struct thread_data *td, struct fio_file *f) {
    const struct options *wanted = td->eo;
    struct millpond_open_options of_file = {.size = sizeof of_file};
    struct millpond_file file;
    int error = generic_open_file(td, f);
    if (error)
        return error;
    of_file.flags = (uint32_t)fcntl(f->fd, F_GETFL) & (O_ACCMODE | O_DIRECT | O_DSYNC);
    of_file.write_mode = wanted->write_mode;
    of_file.backing = wanted->backing;
    pthread_mutex_lock(&lock);
    error = make_engine(td);
    pthread_mutex_unlock(&lock);
    if (!error) {
        error = millpond_open_descriptor(engine, f->fd, &of_file, &file);
        if (error)
            report_error(td, "opening", error);
    }
    if (error) {
        int ignored = generic_close_file(td, f);
        (void)ignored;
        return 1;
    }
    FILE_SET_ENG_DATA(f, (void *)(uintptr_t)file.id);
    return 0;
}

static int close_file(struct thread_data *td, struct fio_file *f) {
    int error = millpond_close(file_of(f));
    int below;
    FILE_SET_ENG_DATA(f, NULL);
    if (error)
        error = report_error(td, "closing", error);
    below = generic_close_file(td, f);
    return error ? error : below;
}

/* invalidate=1: drops the file's pages from both caches. fio also calls it for a newly created file, which is not open. */
static int invalidate(struct thread_data *td, struct fio_file *f) {
    struct millpond_file file = file_of(f);
    int error = 0;
    if (file.id) {
        error = millpond_write_back(file);
        if (!error)
            error = millpond_advise(file, 0, 0, MILLPOND_ADVICE_DONT_NEED);
        if (error)
            return -report_error(td, "invalidating", error);
    }
    return f->fd == -1 ? 0 : -posix_fadvise(f->fd, 0, 0, POSIX_FADV_DONTNEED);
}

static int64_t execute(const struct io_u *io_u) {
    struct millpond_file file = file_of(io_u->file);
    switch (io_u->ddir) {
    case DDIR_READ:
        return millpond_read(file, io_u->xfer_buf, io_u->xfer_buflen, io_u->offset);
    case DDIR_WRITE:
        return millpond_write(file, io_u->xfer_buf, io_u->xfer_buflen, io_u->offset);
    case DDIR_TRIM:
        return millpond_punch_hole(file, io_u->offset, io_u->xfer_buflen);
    case DDIR_SYNC:
        return millpond_sync(file);
    case DDIR_DATASYNC:
        return millpond_sync_data(file);
    case DDIR_SYNC_FILE_RANGE: /* starts writing, without durability */
        return millpond_write_back(file);
    default:
        return -EINVAL;
    }
}

/* Stores the library's result of a request. */
static void set_result(struct io_u *io_u, int64_t result) {
    if (result < 0)
        io_u->error = (unsigned int)-result;
    else if (ddir_sync(io_u->ddir) || io_u->ddir == DDIR_TRIM)
        io_u->resid = 0;
    else
        io_u->resid = io_u->xfer_buflen - (unsigned long long)result;
}

static enum fio_q_status queue(struct thread_data *td, struct io_u *io_u) {
    struct job *job = td->io_ops_data;
    struct millpond_request *request;
    fio_ro_check(td, io_u);
    if (!job || !ddir_rw(io_u->ddir) || io_u->ddir == DDIR_TRIM) {
        /* Earlier requests are submitted first, as with the kernel's AIO. */
        if (job && job->pending)
            return FIO_Q_BUSY;
        set_result(io_u, execute(io_u));
        if (io_u->error) {
            io_u_log_error(td, io_u);
            td_verror(td, io_u->error, "xfer");
        }
        return FIO_Q_COMPLETED;
    }
    if (job->pending == td->o.iodepth)
        return FIO_Q_BUSY;
    request = &job->requests[job->pending++];
    memset(request, 0, sizeof *request);
    request->file = file_of(io_u->file);
    request->user_data = (uint64_t)(uintptr_t)io_u;
    request->offset = io_u->offset;
    request->memory = io_u->xfer_buf;
    request->len = io_u->xfer_buflen;
    request->op = io_u->ddir == DDIR_READ ? MILLPOND_OP_READ : MILLPOND_OP_WRITE;
    return FIO_Q_QUEUED;
}

static int commit(struct thread_data *td) {
    struct job *job = td->io_ops_data;
    unsigned int submitted = 0;
    if (!job)
        return 0;
    if (job->pending && fio_fill_issue_time(td)) {
        struct timespec now;
        fio_gettime(&now, NULL);
        for (unsigned int n = 0; n < job->pending; n++) {
            struct io_u *io_u = (struct io_u *)(uintptr_t)job->requests[n].user_data;
            io_u->issue_time = now;
            io_u_queued(td, io_u);
        }
    }
    while (submitted < job->pending) {
        int64_t more = millpond_queue_submit(job->queue, job->requests + submitted, job->pending - submitted);
        if (more < 0) /* there is room for iodepth, so it is not that the queue is full */
            return -report_error(td, "submitting", more);
        io_u_mark_submit(td, (unsigned int)more);
        submitted += (unsigned int)more;
    }
    job->pending = 0;
    return 0;
}

static int getevents(struct thread_data *td, unsigned int min, unsigned int max, const struct timespec *timeout) {
    struct job *job = td->io_ops_data;
    int64_t ns = timeout ? timeout->tv_sec * 1000000000LL + timeout->tv_nsec : -1;
    int64_t done = job ? millpond_queue_wait(job->queue, job->completions, min, max, ns) : 0;
    return done < 0 ? -report_error(td, "waiting", done) : (int)done;
}

static struct io_u *event(struct thread_data *td, int number) {
    const struct job *job = td->io_ops_data;
    const struct millpond_completion *completion = &job->completions[number];
    struct io_u *io_u = (struct io_u *)(uintptr_t)completion->user_data;
    set_result(io_u, completion->result);
    return io_u;
}

static int cancel(struct thread_data *td, struct io_u *io_u) {
    const struct job *job = td->io_ops_data;
    return job && millpond_queue_cancel(job->queue, (uint64_t)(uintptr_t)io_u) == 0 ? 0 : 1;
}

struct ioengine_ops ioengine = {
    .name = "millpond",
    .version = FIO_IOOPS_VERSION,
    .flags = FIO_ASYNCIO_SYNC_TRIM,
    .init = job_init,
    .cleanup = job_cleanup,
    .open_file = open_file,
    .close_file = close_file,
    .invalidate = invalidate,
    .get_file_size = generic_get_file_size,
    .queue = queue,
    .commit = commit,
    .getevents = getevents,
    .event = event,
    .cancel = cancel,
    .options = options,
    .option_struct_size = sizeof(struct options),
};
