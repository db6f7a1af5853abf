//! Discovery from the Kubernetes API.

mod objects;

pub use objects::{AdapterObject, MAX_LISTED, PodObject, RouteCondition, RouteObject, RouteParent, Watched};
