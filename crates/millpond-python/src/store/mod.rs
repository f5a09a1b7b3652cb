//! `millpond.store`: an object store with the cache of a server, `millpond_serve::SharedStore`, or with a cache in this
//! process, `millpond_objects::CachedStore`.
//!
//! A method of `store_methods` reads cached bytes by `hit`. All else goes by `convert` (arguments) and `calls` (futures) to
//! `operation`, which waits for a future on a thread or an asyncio loop; `runtime` has the threads that run requests.
//! `caches` has the caches of a store, `process_store` that of this process; `place` opens stores by URL, and
//! `server_watch` logs whether a server is used. `body`, `listing` and `writer`
//! are the objects that calls return, `parts` the uploads of long objects, and `item_source` the items of a stream that no call
//! has returned yet. `endpoint` serves stores to other programs.

pub(crate) mod body;
pub(crate) mod caches;
pub(crate) mod calls;
pub(crate) mod convert;
pub(crate) mod endpoint;
pub(crate) mod failure;
mod hit;
pub(crate) mod item_source;
pub(crate) mod listing;
pub(crate) mod operation;
pub(crate) mod parts;
pub(crate) mod place;
pub(crate) mod process_store;
pub(crate) mod runtime;
pub(crate) mod server_watch;
pub(crate) mod settings;
mod store_methods;
pub(crate) mod writer;
