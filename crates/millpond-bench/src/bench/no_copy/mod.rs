//! The suite `no-copy`: the cost of a direct request, in the library alone and with a device.
//!
//! - [`null`]: requests to a back end that completes at once, by the number of segments, against
//!   the same with vectors that are copied for each request, and against io_uring NOPs.
//! - [`device`]: the same requests to the disk, against fio.
//! - [`request_stream`]: the shared part: a stream of requests for a slice of time.

mod device;
mod null;
mod request_stream;

pub use self::null::nop_slice;
pub use self::request_stream::RequestStream;
use super::outcome::Outcome;
use super::plan::Plan;
use crate::failure::Result;

/// Measures all cases.
pub fn run(plan: &Plan) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    null::run(plan, &mut outcome)?;
    device::run(plan, &mut outcome)?;
    Ok(outcome)
}
