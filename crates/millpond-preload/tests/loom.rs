//! Loom models of the library's protocols. They are beside the code that they explore, which is compiled
//! here once more, without the hooks: those would take over what the test harness calls.

#![cfg(loom)]

#[path = "../src/aio_places.rs"]
#[allow(dead_code)]
mod aio_places;
#[path = "../src/aio_slots.rs"]
#[allow(dead_code)]
mod aio_slots;
#[path = "../src/cancel_request.rs"]
#[allow(dead_code)]
mod cancel_request;
#[path = "../src/sync.rs"]
#[allow(dead_code)]
mod sync;
