//! The table of who holds what over forks, without its processes: its own tests are beside it. The library can't
//! be tested in its own process: its hooks would take over what the test harness calls.

#![cfg(not(loom))]

#[path = "../src/runtime"]
mod runtime {
    #[allow(dead_code, reason = "the library uses all of it")]
    mod holders;
    pub mod sync {
        pub use std::sync::atomic::AtomicU32;
    }
}
