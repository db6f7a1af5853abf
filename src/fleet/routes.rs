//! The HTTPRoutes by which Envoy finds the pods of a model when no strategy chooses one (reference section 1.5, step 8).
//!
//! Discovery watches them; a request looks into what is known and waits for nobody.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::Arc;

use ring::digest::{SHA256, digest};

/// The namespace of the routes that the reference's controller makes.
pub const ROUTE_NAMESPACE: &str = "aibrix-system";

const SUFFIX: &str = "-router";
/// The longest name of an object.
const LONGEST_NAME: usize = 253;
/// The longest name of a model that is looked up, bytes: any client may ask.
const LONGEST_MODEL: usize = 512;
/// Hex digits of the hash in a name that had to be made up.
const HASH_DIGITS: usize = 12;

/// What one gateway says about a route (an element of `status.parents`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RouteParent {
    /// Condition `Accepted` is True.
    pub accepted: bool,
    /// Condition `ResolvedRefs` is True.
    pub resolved_refs: bool,
}

/// Why Envoy would not know where to go.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RouteFault {
    /// There is no such object.
    #[error("HTTPRoute {ROUTE_NAMESPACE}/{0} does not exist")]
    Missing(String),
    /// No gateway has looked at it yet.
    #[error("HTTPRoute {ROUTE_NAMESPACE}/{0} has no status: no gateway has taken it yet")]
    NoParent(String),
    /// No gateway accepts it.
    #[error("HTTPRoute {ROUTE_NAMESPACE}/{0} is not accepted: condition Accepted is not True")]
    NotAccepted(String),
    /// It is accepted, but a service that it names cannot be used.
    #[error("HTTPRoute {ROUTE_NAMESPACE}/{0} is not resolved: condition ResolvedRefs is not True")]
    NotResolved(String),
}

/// The routes of [`ROUTE_NAMESPACE`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum RouteTable {
    /// Nothing is known of routes: pods do not come from Kubernetes, the kind is not installed or may not be read, or has
    /// not been listed yet. Then nothing is checked.
    #[default]
    Absent,
    /// All of them, by name.
    Known(HashMap<Arc<str>, Vec<RouteParent>>),
}

impl RouteTable {
    /// There is a route for the model, whatever gateways make of it.
    pub fn names(&self, model: &str) -> bool {
        let RouteTable::Known(routes) = self else { return false };
        model.len() <= LONGEST_MODEL && !model.is_empty() && routes.contains_key(&*route_name(model))
    }

    /// Whether Envoy has a way to the pods of this model. One gateway that has accepted and resolved the route is enough;
    /// other gateways may not want it.
    pub fn check(&self, model: &str) -> Result<(), RouteFault> {
        let RouteTable::Known(routes) = self else { return Ok(()) };
        let name = route_name(model);
        match routes.get(&*name).map(Vec::as_slice) {
            None => Err(RouteFault::Missing(name)),
            Some([]) => Err(RouteFault::NoParent(name)),
            Some(parents) if parents.iter().any(|parent| parent.accepted && parent.resolved_refs) => Ok(()),
            Some(parents) if parents.iter().any(|parent| parent.accepted) => Err(RouteFault::NotResolved(name)),
            Some(_) => Err(RouteFault::NotAccepted(name)),
        }
    }
}

/// The name of the route of a model: `<model>-router` where that can be the name of an object. Any other model gets its
/// name in lower case with a dash for every run of other characters (`model` if nothing is left), cut so that all fits, then
/// a dash, the first 12 hex digits of the SHA-256 of its name as it is, and `-router`.
pub fn route_name(model: &str) -> String {
    let plain = format!("{model}{SUFFIX}");
    if is_object_name(&plain) {
        return plain;
    }
    let mut base = String::with_capacity(model.len().min(LONGEST_NAME));
    for letter in model.chars().filter_map(|letter| letter.to_lowercase().next()) {
        if letter.is_ascii_lowercase() || letter.is_ascii_digit() {
            base.push(letter);
        } else if !base.ends_with('-') {
            base.push('-');
        }
    }
    let base = match base.trim_matches('-') {
        "" => "model",
        base => base.get(..LONGEST_NAME - SUFFIX.len() - HASH_DIGITS - 1).unwrap_or(base).trim_end_matches('-'),
    };
    format!("{base}-{}{SUFFIX}", hash(model))
}

/// A DNS subdomain name (RFC 1123) as Kubernetes takes it for names of objects.
fn is_object_name(name: &str) -> bool {
    name.len() <= LONGEST_NAME
        && name.split('.').all(|label| {
            !label.is_empty()
                && !label.starts_with('-')
                && !label.ends_with('-')
                && label.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
        })
}

/// The first digits of the SHA-256.
fn hash(text: &str) -> String {
    let mut digits = String::with_capacity(HASH_DIGITS);
    for byte in digest(&SHA256, text.as_bytes()).as_ref().iter().take(HASH_DIGITS / 2) {
        // Writing into a `String` cannot fail.
        let _ = write!(digits, "{byte:02x}");
    }
    digits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_routes() {
        let long = "a".repeat(246);
        let longer = "a".repeat(247);
        for (model, expected) in [
            ("demo", "demo-router".to_owned()),
            ("qwen2.5-7b", "qwen2.5-7b-router".to_owned()),
            // `printf 'Qwen/Qwen2.5-7B' | sha256sum`, and so on.
            ("Qwen/Qwen2.5-7B", "qwen-qwen2-5-7b-401a4b448e74-router".to_owned()),
            ("a..b", "a-b-f62b42414c51-router".to_owned()),
            ("-a", "a-c27489179034-router".to_owned()),
            ("a_-_b", "a-b-0d932fc997ce-router".to_owned()),
            ("é!", "model-f77173de65c6-router".to_owned()),
            ("", "model-e3b0c44298fc-router".to_owned()),
            (&long, format!("{long}-router")),
            (&longer, format!("{}-HASH-router", "a".repeat(233))),
        ] {
            let name = route_name(model);
            let expected = expected.replace("HASH", &hash(model));
            assert_eq!(name, expected, "{model}");
            assert!(is_object_name(&name) && name.len() <= LONGEST_NAME, "{name}");
        }
        // FIPS 180-2, appendix B.1.
        assert_eq!(hash("abc"), "ba7816bf8f01");
    }

    #[test]
    fn one_gateway_that_has_accepted_and_resolved_the_route_is_enough() {
        let parent = |accepted, resolved_refs| RouteParent { accepted, resolved_refs };
        let (good, half, bad) = (parent(true, true), parent(true, false), parent(false, true));
        let name = || "m-router".to_owned();
        for (parents, expected) in [
            (None, Err(RouteFault::Missing(name()))),
            (Some(vec![]), Err(RouteFault::NoParent(name()))),
            (Some(vec![bad]), Err(RouteFault::NotAccepted(name()))),
            (Some(vec![half]), Err(RouteFault::NotResolved(name()))),
            (Some(vec![bad, half]), Err(RouteFault::NotResolved(name()))),
            (Some(vec![good]), Ok(())),
            (Some(vec![bad, half, good]), Ok(())),
        ] {
            let routes = parents.into_iter().map(|parents| (Arc::from("m-router"), parents)).collect();
            assert_eq!(RouteTable::Known(routes).check("m"), expected);
        }
        assert_eq!(RouteTable::Absent.check("m"), Ok(()));
    }
}
