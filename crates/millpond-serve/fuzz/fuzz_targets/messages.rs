//! Messages of a peer, with any bytes: an error, or a message that is encoded as it came.

#![no_main]

use libfuzzer_sys::fuzz_target;
use millpond_serve::protocol::{Greeting, Hello, Reply, Request};

fuzz_target!(|bytes: &[u8]| {
    _ = Hello::decode(bytes);
    if let Ok(greeting) = Greeting::decode(bytes) {
        let again = greeting.encode().expect("it was a message");
        assert_eq!(Greeting::decode(&again), Ok(greeting));
    }
    if let Ok((number, request)) = Request::decode(bytes) {
        let again = request.encode(number).expect("it was a message");
        assert_eq!(Request::decode(&again), Ok((number, request)));
    }
    if let Ok((number, reply)) = Reply::decode(bytes) {
        let again = reply.encode(number).expect("it was a message");
        assert_eq!(Reply::decode(&again), Ok((number, reply)));
    }
});
