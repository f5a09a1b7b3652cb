//! Why a file is left to the kernel.

macro_rules! reasons {
    ($($(#[$doc:meta])* $name:ident => $text:literal,)*) => {
        /// Why a file is left to the kernel.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u32)]
        pub enum Reason { $($(#[$doc])* $name,)* }

        pub const REASONS: &[(Reason, &str)] = &[$((Reason::$name, $text),)*];
    };
}

reasons! {
    /// Mode through: read too seldom to be mapped.
    Once => "once",
    /// Locked, and open when the program started, or received, or opened past the hooks.
    Inherited => "inherited",
    /// Standard input, output or error, a stream, or `dprintf`: libc reads and writes there by itself.
    Stdio => "stdio",
    /// Mode back without `--eager`: open for reading only.
    ReadOnly => "read-only",
    /// Another process had it open in a way that allows changes.
    OpenElsewhere => "open-elsewhere",
    /// Another process opened it, and broke the lease.
    OpenedElsewhere => "opened-elsewhere",
    /// The program has it open several times, once for writing, in a way that can't be served (`multi_open`).
    OpenTwice => "open-twice",
    /// The file system, or the file's owner, allows no lease.
    NoLease => "no-lease",
    /// Not on a local file system.
    FileSystem => "file-system",
    /// Opened with `O_DIRECT`.
    Direct => "o-direct",
    /// Opened with `O_SYNC` or `O_DSYNC`.
    Synchronous => "o-sync",
    /// Opened with `O_APPEND` on a kernel that can't write there at an offset (before 6.9).
    Append => "o-append",
    /// Open at a fork: the child shares it.
    Forked => "forked",
    /// Given to another program: exec, spawn, or over a socket.
    Given => "given",
    /// Mapped.
    Mapped => "mapped",
    /// The program has it open several times, and locked.
    Locked => "locked",
    /// Changed in a way that only the kernel does: its flags, its blocks, or by path.
    Changed => "changed",
    /// Read or written inside libc, by POSIX AIO.
    InLibc => "in-libc",
    /// The program has I/O of its own that no hook sees: by io_uring, by a library that binds to
    /// libc first, or with descriptors that only some of its threads have.
    Unseen => "unseen",
    /// No descriptor was left for the engine.
    Descriptors => "descriptors",
    /// The engine could not take it.
    Engine => "engine",
}

impl Reason {
    pub fn of_bits(bits: u32) -> Self {
        REASONS.get(bits as usize).map_or(Reason::Engine, |(reason, _)| *reason)
    }
}
