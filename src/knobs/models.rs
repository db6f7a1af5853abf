//! Models without pods: for how long they are remembered, and whether sleeping ones are woken.

use std::time::Duration;

use super::parse;
use super::read::{Reader, secs};

/// What is done about a model that has no pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelKnobs {
    /// `TANDEM_MODEL_MEMORY_SECONDS` (86400 s): a model whose last pod went is known for so long; zero = not at all.
    pub memory: Duration,
    /// `TANDEM_WAKE_SLEEPING_MODELS` (true): a request for a model whose claims sleep wakes it.
    pub wake: bool,
    /// `TANDEM_MODEL_RUNTIME_PORT` (8080): where a pod's runtime is told to wake a model.
    pub runtime_port: u16,
}

impl Default for ModelKnobs {
    fn default() -> ModelKnobs {
        ModelKnobs { memory: Duration::from_hours(24), wake: true, runtime_port: 8080 }
    }
}

pub(super) fn read(reader: &mut Reader<'_>) -> ModelKnobs {
    let default = ModelKnobs::default();
    ModelKnobs {
        memory: reader.value("TANDEM_MODEL_MEMORY_SECONDS", default.memory, parse::seconds_or_zero, secs),
        wake: reader.value("TANDEM_WAKE_SLEEPING_MODELS", default.wake, parse::boolean, bool::to_string),
        runtime_port: reader.value("TANDEM_MODEL_RUNTIME_PORT", default.runtime_port, parse::port, u16::to_string),
    }
}
