//! Loom models of the library's protocols. The models are in the modules that they explore. This test compiles those
//! modules again without the hooks, which would replace the functions that the test harness calls.

#![cfg(loom)]
#![allow(dead_code)]

#[path = "../src/files"]
mod files {
    mod bypass;
    mod references;
}
#[path = "../src/runtime"]
mod runtime {
    #[path = "cancel/cancel_request.rs"]
    mod cancel_request;
    mod forks;
    pub mod in_flight;
    pub mod reading;
    pub mod sync;
}
