//! Below the cache: vectored transfers and the back ends that carry them out.

pub(crate) mod segment_list;

pub(crate) mod segment;

pub(crate) mod transfer;

pub(crate) mod request;

pub(crate) mod flight;

pub(crate) mod batch;

pub(crate) mod signal;

pub(crate) mod reaping;

pub(crate) mod pool;

pub(crate) mod backend;
