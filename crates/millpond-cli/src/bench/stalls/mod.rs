//! The suite `stalls`: how long one operation takes while others do their worst.
//!
//! - [`sync`]: a sync while threads overwrite the file as fast as they can.
//! - [`append`]: an append while threads extend the file as fast as they can.
//! - [`evict`]: a cached write while somebody has to find a page to evict, and none is cold.
//!
//! What counts is not the rate but the longest: rows have quantiles of what one operation took, over all
//! slices, and notes have the longest and what the bar says of it. The first slice of each side is not
//! counted.

mod append;
mod evict;
mod side;
mod sync;

use super::outcome::Outcome;
use super::plan::Plan;
use crate::failure::Result;

/// Measures all cases.
pub fn run(plan: &Plan) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    sync::run(plan, &mut outcome)?;
    append::run(plan, &mut outcome)?;
    evict::run(plan, &mut outcome)?;
    Ok(outcome)
}
