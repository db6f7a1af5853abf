//! From watched objects to what the fleet keeps of them. Pure.

use std::sync::Arc;

use super::kubernetes::{AdapterObject, RouteObject};
use crate::fleet::{AdapterSpec, ROUTE_NAMESPACE, RouteParent, RouteTable};

/// An adapter is served wherever its status says, whatever its phase: it may be scaled while it serves.
impl From<&AdapterObject> for AdapterSpec {
    fn from(object: &AdapterObject) -> AdapterSpec {
        AdapterSpec {
            namespace: Arc::from(&*object.namespace),
            name: Arc::from(&*object.name),
            instances: object.instances.iter().map(|name| Arc::from(&**name)).collect(),
        }
    }
}

/// All routes as they were listed; those of other namespaces are none of Envoy's for models.
pub fn route_table<'a>(routes: impl IntoIterator<Item = &'a RouteObject>) -> RouteTable {
    let ours = routes.into_iter().filter(|route| route.namespace == ROUTE_NAMESPACE);
    RouteTable::Known(
        ours.map(|route| {
            let parents = route.parents.iter().map(|parent| {
                let holds = |kind: &str| {
                    parent.conditions.iter().any(|condition| condition.kind == kind && condition.status == "True")
                };
                RouteParent { accepted: holds("Accepted"), resolved_refs: holds("ResolvedRefs") }
            });
            (Arc::from(&*route.name), parents.collect())
        })
        .collect(),
    )
}
