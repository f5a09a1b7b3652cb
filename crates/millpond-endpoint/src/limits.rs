//! Limits of connections, memory and disk space.

use std::time::Duration;

/// Limits that keep a client from harming others.
///
/// # Examples
///
/// ```
/// use millpond_endpoint::Limits;
///
/// let limits = Limits { upload_memory_bytes: 1 << 30, ..Limits::default() };
/// ```
#[derive(Debug, Clone)]
pub struct Limits {
    /// Open connections of each listener. At the limit, the one that has been idle for the longest time is closed.
    pub connections: usize,
    /// Of these, connections of the address without a valid signature so far. At the limit, a further one waits until one has a
    /// signature or ends, or the oldest one that is idle is a second old, and is closed. The Unix socket has no such limit.
    pub unsigned_connections: usize,
    /// A connection that has brought no request with a valid signature by this age is closed. A request without one ends
    /// such a connection at once.
    pub unsigned_age_max: Duration,
    /// A connection that waits this long for a complete request head is closed.
    pub idle_max: Duration,
    /// Longest pause within a request's body.
    pub body_pause_max: Duration,
    /// Longest pause of a client that receives a response.
    pub output_pause_max: Duration,
    /// A longer request head is refused.
    pub head_bytes_max: usize,
    /// Memory for the bodies of all uploads together. An upload waits until its share is free.
    pub upload_memory_bytes: usize,
    /// Uploads are passed on to the store in parts of this size. An upload of several parts takes the memory of four.
    pub part_bytes: usize,
    /// Largest conditional upload. Stores offer no conditional multipart uploads, so it is held in memory.
    pub conditional_bytes_max: usize,
    /// Multipart uploads in progress.
    pub uploads: usize,
    /// Space on disk for the parts of all multipart uploads together.
    pub spool_bytes: u64,
    /// A multipart upload without a request for this long is dropped.
    pub upload_age_max: Duration,
    /// When the endpoint ends, requests in progress get this time.
    pub shutdown_grace: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 512,
            unsigned_connections: 64,
            unsigned_age_max: Duration::from_secs(10),
            idle_max: Duration::from_secs(60),
            body_pause_max: Duration::from_secs(30),
            output_pause_max: Duration::from_secs(60),
            head_bytes_max: 64 << 10,
            upload_memory_bytes: 256 << 20,
            part_bytes: 8 << 20,
            conditional_bytes_max: 64 << 20,
            uploads: 1000,
            spool_bytes: 64 << 30,
            upload_age_max: Duration::from_secs(24 * 3600),
            shutdown_grace: Duration::from_secs(10),
        }
    }
}
