//! A function that runs before `main`.

/// Has a function of the binary's run when that has been loaded, before `main` and before std's runtime starts; the
/// process goes on to `main` when it returns. Once in a module.
///
/// What std's runtime does first has not been done: SIGPIPE is as it was, the numbers 0 to 2 may be free, and a
/// stack that overflows is not told as such. Arguments and environment can be read.
#[macro_export]
macro_rules! before_main {
    ($function:path) => {
        // SAFETY: the section holds functions of this kind, which the C library calls with three arguments;
        // one of the C calling convention may ignore them. Those of std, which keep the arguments, have a
        // priority and come first.
        #[used]
        #[unsafe(link_section = ".init_array")]
        static BEFORE_MAIN: extern "C" fn() = {
            extern "C" fn before_main() {
                $function();
            }
            before_main
        };
    };
}
