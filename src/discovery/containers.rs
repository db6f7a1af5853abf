//! What the containers of a pod say: how many data-parallel endpoints it has, and which restarts are the engine's. Pure.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// The variable of a container by which a pod says that it serves several data-parallel ranks, one on each port from its
/// serving port on (reference section 3.2).
const DATA_PARALLEL_SIZE: &str = "data-parallel-size";
/// The sidecar that AIBrix adds to pods: never the engine of a pod that has another container.
const RUNTIME_SIDECAR: &str = "aibrix-runtime";

/// Data-parallel ranks of one pod that become endpoints.
pub(super) const MAX_RANKS: u16 = 64;
/// Containers of one pod that are looked at.
const MAX_CONTAINERS: usize = 64;
/// The longest name of a container, bytes (a DNS label).
const MAX_NAME_BYTES: usize = 63;
/// The longest value of the variable that is read, characters.
const MAX_VALUE_CHARS: usize = 32;

/// `spec` of a pod, as far as it is read.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct PodTemplate {
    containers: Option<Vec<Container>>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
struct Container {
    name: Option<String>,
    ports: Option<Vec<ContainerPort>>,
    env: Option<Vec<Variable>>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct ContainerPort {
    container_port: Scalar,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
struct Variable {
    name: Scalar,
    value: Scalar,
}

/// One of `status.containerStatuses`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct ContainerStatus {
    name: Option<String>,
    restart_count: u32,
}

impl PodTemplate {
    fn containers(&self) -> impl Iterator<Item = &Container> {
        self.containers.iter().flatten().take(MAX_CONTAINERS)
    }

    /// Data-parallel ranks: the first variable with a value decides, as in the reference. 1 with a sentence when it cannot
    /// be used.
    pub(super) fn ranks(&self) -> (u16, Option<String>) {
        let Some(text) = self.containers().find_map(Container::data_parallel_size) else { return (1, None) };
        let shown: String = text.chars().take(MAX_VALUE_CHARS).collect();
        let number = (text.chars().count() <= MAX_VALUE_CHARS).then(|| text.parse::<i64>().ok()).flatten();
        match number {
            Some(number @ 0..) => match u16::try_from(number) {
                Ok(ranks) if ranks <= MAX_RANKS => (ranks.max(1), None),
                _ => {
                    let text =
                        format!("variable {DATA_PARALLEL_SIZE} is {shown}; the first {MAX_RANKS} ranks are used");
                    (MAX_RANKS, Some(text))
                }
            },
            _ => (1, Some(format!("variable {DATA_PARALLEL_SIZE} is {shown:?}, which is no size; one port is used"))),
        }
    }

    /// How often the engine on `port` was started again: restarts of other containers forget nothing of it.
    ///
    /// The engine's containers are those that declare `port`, else those that declare the pod's serving port `base`, else
    /// `main` (the annotation `kubectl.kubernetes.io/default-container`), else the first that is not AIBrix's sidecar. Where
    /// the manifest does not list containers, all count but that sidecar; and all do of a pod with several ranks that
    /// declares no port.
    pub(super) fn restarts(&self, statuses: &[ContainerStatus], main: Option<&str>, port: Endpoint) -> u32 {
        let declaring = |port: u16| self.containers().filter(move |container| container.declares(port));
        let names = |found: &mut dyn Iterator<Item = &Container>| -> Vec<String> {
            found.filter_map(|container| container.name().map(str::to_owned)).collect()
        };
        let mut engines = names(&mut declaring(port.port));
        if engines.is_empty() {
            engines = names(&mut declaring(port.base));
        }
        if engines.is_empty() {
            engines = names(&mut self.containers().filter(|container| main.is_some() && container.name() == main));
        }
        if engines.is_empty() {
            let room = if port.alone { 1 } else { MAX_CONTAINERS };
            engines = names(&mut self.containers().filter(|one| one.name() != Some(RUNTIME_SIDECAR)).take(room));
        }
        let counts = |name: &str| match (engines.is_empty(), main) {
            (false, _) => engines.iter().any(|engine| engine == name),
            // No containers are listed, only their statuses.
            (true, Some(main)) if statuses.iter().any(|status| status.name.as_deref() == Some(main)) => name == main,
            (true, _) => name != RUNTIME_SIDECAR || statuses.len() == 1,
        };
        sum(statuses.iter().take(MAX_CONTAINERS).filter(|status| counts(status.name.as_deref().unwrap_or_default())))
    }

    /// The same without what is not read of it, given the ports that the pod serves on.
    pub(super) fn reduced(mut self, ports: std::ops::RangeInclusive<u16>) -> Option<PodTemplate> {
        let containers = self.containers.as_mut()?;
        containers.truncate(MAX_CONTAINERS);
        for container in containers.iter_mut() {
            container.name.take_if(|name| name.len() > MAX_NAME_BYTES);
            let size = container.data_parallel_size().map(|text| text.chars().take(MAX_VALUE_CHARS + 1).collect());
            container.env = size.map(|value| {
                vec![Variable { name: Scalar(Some(DATA_PARALLEL_SIZE.to_owned())), value: Scalar(Some(value)) }]
            });
            let declared = container.ports.take().unwrap_or_default();
            let mut kept: Vec<u16> = declared.iter().filter_map(|port| port.container_port.port()).collect();
            kept.retain(|port| ports.contains(port));
            kept.sort_unstable();
            kept.dedup();
            let text = |port: u16| ContainerPort { container_port: Scalar(Some(port.to_string())) };
            container.ports = (!kept.is_empty()).then(|| kept.into_iter().map(text).collect());
        }
        Some(self)
    }
}

/// A serving port of a pod.
#[derive(Clone, Copy, Debug)]
pub(super) struct Endpoint {
    /// Its own.
    pub(super) port: u16,
    /// The pod's first.
    pub(super) base: u16,
    /// The pod has no other.
    pub(super) alone: bool,
}

/// How often any container of the pod was started again.
pub(super) fn all_restarts(statuses: &[ContainerStatus]) -> u32 {
    sum(statuses.iter().take(MAX_CONTAINERS))
}

fn sum<'a>(statuses: impl Iterator<Item = &'a ContainerStatus>) -> u32 {
    statuses.fold(0, |sum: u32, status| sum.saturating_add(status.restart_count))
}

/// The statuses without what is not read of them.
pub(super) fn reduced_statuses(mut statuses: Vec<ContainerStatus>) -> Option<Vec<ContainerStatus>> {
    statuses.truncate(MAX_CONTAINERS);
    for status in &mut statuses {
        status.name.take_if(|name| name.len() > MAX_NAME_BYTES);
    }
    statuses.shrink_to_fit();
    (!statuses.is_empty()).then_some(statuses)
}

impl Container {
    fn name(&self) -> Option<&str> {
        self.name.as_deref().filter(|name| name.len() <= MAX_NAME_BYTES)
    }

    fn declares(&self, port: u16) -> bool {
        self.ports.iter().flatten().any(|declared| declared.container_port.port() == Some(port))
    }

    fn data_parallel_size(&self) -> Option<&str> {
        let named = self.env.iter().flatten().filter(|variable| variable.name.text() == Some(DATA_PARALLEL_SIZE));
        named.filter_map(|variable| variable.value.text()).find(|value| !value.is_empty())
    }
}

/// A text or a number; anything else counts as absent, so that an odd value of a variable that is none of the gateway's
/// business does not spoil a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Scalar(Option<String>);

impl Scalar {
    fn text(&self) -> Option<&str> {
        self.0.as_deref()
    }

    fn port(&self) -> Option<u16> {
        self.text()?.parse().ok().filter(|port| *port > 0)
    }
}

impl<'de> Deserialize<'de> for Scalar {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Scalar, D::Error> {
        deserializer.deserialize_any(ScalarVisitor).map(Scalar)
    }
}

struct ScalarVisitor;

impl<'de> Visitor<'de> for ScalarVisitor {
    type Value = Option<String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
        Ok(Some(text.to_owned()))
    }

    fn visit_i64<E>(self, number: i64) -> Result<Self::Value, E> {
        Ok(Some(number.to_string()))
    }

    fn visit_u64<E>(self, number: u64) -> Result<Self::Value, E> {
        Ok(Some(number.to_string()))
    }

    fn visit_f64<E>(self, number: f64) -> Result<Self::Value, E> {
        Ok(Some(number.to_string()))
    }

    fn visit_bool<E>(self, _: bool) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_none<E>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_some<D: Deserializer<'de>>(self, inner: D) -> Result<Self::Value, D::Error> {
        inner.deserialize_any(ScalarVisitor)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
        while list.next_element::<IgnoredAny>()?.is_some() {}
        Ok(None)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(None)
    }
}
