//! `--standalone --endpoints-config FILE`: a fixed fleet without Kubernetes (reference section 11). Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv6Addr;
use std::sync::Arc;

use serde::Deserialize;

use super::manifest::is_host_name;
use crate::fleet::{Engine, PodKey, PodSpec, Role};

const DEFAULT_PORT: u16 = 8000;
const DEFAULT_BOOTSTRAP_PORT: u16 = 8998;

/// The endpoints file is not usable. Nothing is taken from it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EndpointsError {
    /// The file cannot be read.
    #[error("cannot read {path}: {text}")]
    Unreadable {
        /// The file.
        path: String,
        /// The system's word on it.
        text: String,
    },
    /// Not YAML, or not of the expected shape.
    #[error("endpoints config is not usable: {0}")]
    Syntax(String),
    /// The file lists no model.
    #[error("endpoints config has no models")]
    NoModels,
    /// A model without name.
    #[error("model {0} has no name")]
    UnnamedModel(usize),
    /// Two models of one name.
    #[error("model {0:?} is listed twice")]
    DuplicateModel(String),
    /// Both ways to list pods at once.
    #[error("model {0:?} has both endpoints and rolesets")]
    EndpointsAndRolesets(String),
    /// Neither way.
    #[error("model {0:?} has neither endpoints nor rolesets")]
    NoEndpoints(String),
    /// A roleset without name.
    #[error("model {0:?} has a roleset without a name")]
    UnnamedRoleset(String),
    /// Two rolesets of one name.
    #[error("model {0:?} lists roleset {1:?} twice")]
    DuplicateRoleset(String, String),
    /// An endpoint that is not `host` or `host:port`.
    #[error("model {model:?}: endpoint {endpoint:?} is not usable: {text}")]
    BadEndpoint {
        /// The model.
        model: String,
        /// The endpoint as written.
        endpoint: String,
        /// What is wrong with it.
        text: &'static str,
    },
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct File {
    models: Vec<ModelEntry>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ModelEntry {
    name: String,
    engine: Option<String>,
    endpoints: Vec<String>,
    rolesets: Vec<RolesetEntry>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct RolesetEntry {
    name: String,
    prefill: Vec<String>,
    decode: Vec<String>,
}

/// Reads the file at `path`. Called once, at start.
pub fn load_endpoints(path: &std::path::Path) -> Result<Vec<PodSpec>, EndpointsError> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| EndpointsError::Unreadable { path: path.display().to_string(), text: error.to_string() })?;
    parse_endpoints(&text)
}

/// Makes one ready pod for each endpoint, in the order of the text. The pods are named `<model>-<host>-<index>` in
/// namespace `standalone`, where the index runs through the whole file so that no two names meet. Unlike the
/// reference's, they are scraped on their serving port.
pub fn parse_endpoints(text: &str) -> Result<Vec<PodSpec>, EndpointsError> {
    let options = serde_saphyr::options! { with_snippet: false };
    let file: Option<File> = serde_saphyr::from_str_with_options(text, options)
        .map_err(|error| EndpointsError::Syntax(error.to_string()))?;
    let models = file.unwrap_or_default().models;
    if models.is_empty() {
        return Err(EndpointsError::NoModels);
    }
    let mut names = BTreeSet::new();
    let mut specs = Vec::new();
    for (position, model) in models.iter().enumerate() {
        if model.name.trim().is_empty() {
            return Err(EndpointsError::UnnamedModel(position + 1));
        }
        if !names.insert(model.name.trim()) {
            return Err(EndpointsError::DuplicateModel(model.name.clone()));
        }
        add_model(model, &mut specs)?;
    }
    Ok(specs)
}

fn add_model(model: &ModelEntry, specs: &mut Vec<PodSpec>) -> Result<(), EndpointsError> {
    match (model.endpoints.is_empty(), model.rolesets.is_empty()) {
        (false, false) => return Err(EndpointsError::EndpointsAndRolesets(model.name.clone())),
        (true, true) => return Err(EndpointsError::NoEndpoints(model.name.clone())),
        _ => {}
    }
    for endpoint in &model.endpoints {
        specs.push(pod(model, endpoint, None, specs.len())?);
    }
    let mut names = BTreeSet::new();
    for roleset in &model.rolesets {
        if roleset.name.trim().is_empty() {
            return Err(EndpointsError::UnnamedRoleset(model.name.clone()));
        }
        if !names.insert(roleset.name.as_str()) {
            return Err(EndpointsError::DuplicateRoleset(model.name.clone(), roleset.name.clone()));
        }
        for (role, endpoints) in [("prefill", &roleset.prefill), ("decode", &roleset.decode)] {
            for endpoint in endpoints {
                specs.push(pod(model, endpoint, Some((&roleset.name, role)), specs.len())?);
            }
        }
    }
    Ok(())
}

fn pod(
    model: &ModelEntry,
    endpoint: &str,
    part: Option<(&str, &str)>,
    index: usize,
) -> Result<PodSpec, EndpointsError> {
    let (host, port) = split_endpoint(endpoint.trim()).map_err(|text| EndpointsError::BadEndpoint {
        model: model.name.clone(),
        endpoint: endpoint.to_owned(),
        text,
    })?;
    let name = format!("{}-{}-{index}", sanitized(model.name.trim()), host.replace(['.', ':'], "-"));
    let key = PodKey { namespace: Arc::from("standalone"), name: Arc::from(name) };
    let mut labels = BTreeMap::from([
        ("model.aibrix.ai/name".to_owned(), model.name.trim().to_owned()),
        ("model.aibrix.ai/port".to_owned(), port.to_string()),
    ]);
    if let Some(engine) = &model.engine {
        labels.insert("model.aibrix.ai/engine".to_owned(), engine.clone());
    }
    if let Some((roleset, role)) = part {
        labels.insert("roleset-name".to_owned(), roleset.to_owned());
        labels.insert("role-name".to_owned(), role.to_owned());
    }
    Ok(PodSpec {
        uid: Arc::from(key.to_string()),
        restarts: 0,
        model: Arc::from(model.name.trim()),
        host: Arc::from(host),
        port,
        metric_port: port,
        engine: Engine::from_label(model.engine.as_deref()),
        kv_connector: None,
        bootstrap_port: DEFAULT_BOOTSTRAP_PORT,
        role: Role::from_label(part.map(|(_, role)| role)),
        roleset: part.map(|(roleset, _)| Arc::from(roleset)),
        replica_index: None,
        serves_http: true,
        pd: true,
        draining: false,
        tls: false,
        rank: 0,
        ready: true,
        terminating: false,
        labels: Arc::new(labels),
        config: None,
        also: Vec::new(),
        claim: None,
        key,
    })
}

/// Splits `host`, `host:port`, `[v6]`, `[v6]:port` or a bare IPv6 address.
fn split_endpoint(endpoint: &str) -> Result<(&str, u16), &'static str> {
    let (host, port) = if let Some(rest) = endpoint.strip_prefix('[') {
        let (host, rest) = rest.split_once(']').ok_or("the bracket does not close")?;
        (host, rest.strip_prefix(':').or((!rest.is_empty()).then_some("?")))
    } else if endpoint.parse::<Ipv6Addr>().is_ok() {
        (endpoint, None)
    } else {
        match endpoint.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (endpoint, None),
        }
    };
    let is_ip = host.parse::<std::net::IpAddr>().is_ok();
    if !is_ip && !is_host_name(host) {
        return Err("the host is neither an address nor a name");
    }
    match port.map(str::parse::<u16>) {
        None => Ok((host, DEFAULT_PORT)),
        Some(Ok(port)) if port > 0 => Ok((host, port)),
        Some(_) => Err("the port is not a number from 1 to 65535"),
    }
}

fn sanitized(model: &str) -> String {
    let text: String = model
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() || c == '-' { c.to_ascii_lowercase() } else { '-' })
        .collect();
    text.trim_matches('-').to_owned()
}
