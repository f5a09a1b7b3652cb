//! Loom models of the library's protocols. They are beside the code that they explore, which is compiled
//! here once more, without the hooks: those would take over what the test harness calls.

#![cfg(loom)]
#![allow(dead_code)]

#[path = "../src/aio"]
mod aio {
    mod places;
    mod slots;
}
#[path = "../src/files"]
mod files {
    mod bypass;
    mod references;
}
#[path = "../src/runtime"]
mod runtime {
    mod forks;
    pub mod in_flight;
    pub mod reading;
    #[path = "cancel/request.rs"]
    mod request;
    pub mod sync;
}
