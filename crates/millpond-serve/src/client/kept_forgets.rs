//! Written objects that a server may still have in its cache, until one receives their names.

use object_store::path::Path;

use crate::protocol::Request;

/// Beyond this many objects the server removes all. Fewer than the requests that a server takes at a time.
const OBJECTS_MAX: usize = 256;

/// The objects that were written while no server answered, though one may have been there.
#[derive(Debug, Default)]
pub(crate) struct KeptForgets {
    /// Empty if all objects are to be removed.
    locations: Vec<String>,
    is_all: bool,
}

impl KeptForgets {
    pub(crate) fn is_empty(&self) -> bool {
        self.locations.is_empty() && !self.is_all
    }

    pub(crate) fn add(&mut self, location: &Path) {
        self.add_name(location.as_ref());
    }

    fn add_name(&mut self, location: &str) {
        if self.is_all || self.locations.iter().any(|kept| kept == location) {
            return;
        }
        if self.locations.len() == OBJECTS_MAX {
            *self = KeptForgets { locations: Vec::new(), is_all: true };
            return;
        }
        self.locations.push(location.to_string());
    }

    /// Adds the objects of another list, whose server has not answered.
    pub(crate) fn add_all(&mut self, others: &KeptForgets) {
        if others.is_all {
            *self = KeptForgets { locations: Vec::new(), is_all: true };
        }
        for location in &others.locations {
            // As it is: `Path::from` would encode a percent sign again.
            self.add_name(location);
        }
    }

    /// The messages to a server.
    pub(crate) fn requests(&self) -> Vec<Request> {
        if self.is_all {
            return vec![Request::ForgetAll];
        }
        let forget = |location: &String| Request::Forget { location: location.clone() };
        self.locations.iter().map(forget).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stay_as_they_are() {
        let location = Path::from("100% of it");
        let (mut kept, mut others) = (KeptForgets::default(), KeptForgets::default());
        kept.add(&location);
        others.add_all(&kept);
        assert_eq!(others.requests(), [Request::Forget { location: location.to_string() }]);
    }

    #[test]
    fn beyond_the_bound_all_objects_are_forgotten() {
        let mut kept = KeptForgets::default();
        assert!(kept.is_empty() && kept.requests().is_empty());
        for number in (0..OBJECTS_MAX).chain(0..OBJECTS_MAX) {
            kept.add(&Path::from(format!("pond/{number}")));
        }
        let mut others = KeptForgets::default();
        others.add_all(&kept);
        let requests = others.requests();
        assert_eq!(requests.len(), OBJECTS_MAX);
        assert_eq!(requests[0], Request::Forget { location: "pond/0".into() });
        kept.add(&Path::from("lake"));
        assert!(!kept.is_empty());
        assert_eq!(kept.requests(), [Request::ForgetAll]);
        others.add_all(&kept);
        assert_eq!(others.requests(), [Request::ForgetAll]);
    }
}
