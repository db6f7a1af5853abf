//! Text → Kubernetes objects: documents of YAML or JSON, each read by itself. Pure.

use std::sync::Arc;

use serde::Deserialize;

use super::manifest::Manifest;
use crate::fleet::AdapterSpec;

const ADAPTER: &str = "ModelAdapter";

/// A document that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("document {document}{}: {text}", .pod.as_ref().map(|pod| format!(" (pod {pod})")).unwrap_or_default())]
pub struct ManifestError {
    /// Its number in the file, from 1.
    pub document: usize,
    /// The pod's name, where it could be made out.
    pub pod: Option<String>,
    /// What is wrong. Never quotes the document, which may hold secrets.
    pub text: String,
}

/// The documents of one file: pods (a list is taken apart), and what could not be read.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Documents {
    /// Pod objects in the order of the text.
    pub pods: Vec<Manifest>,
    /// LoRA adapters (documents of kind `ModelAdapter`).
    pub adapters: Vec<AdapterSpec>,
    /// Broken documents.
    pub broken: Vec<ManifestError>,
    /// Documents of another kind, as sentences.
    pub foreign: Vec<String>,
}

/// Splits a text into documents and reads each by itself, so that one broken document does not hide the others.
pub fn read_documents(text: &str) -> Documents {
    let text = text.trim_start_matches('\u{feff}');
    let mut documents = Documents::default();
    // Inside JSON no line can begin so: its strings hold no line breaks.
    let separated = text.lines().any(|line| line.starts_with("---"));
    let is_json = !separated && text.trim_start().starts_with(['{', '[']);
    if is_json && read_json(text, &mut documents) {
        return documents;
    }
    // YAML's own rule: `---` at the start of a line, then a blank or the end of the line, whatever surrounds it.
    let (mut number, mut start, mut offset) = (0, 0, 0);
    let mut pieces = Vec::new();
    for line in text.split_inclusive('\n') {
        if line.strip_prefix("---").is_some_and(|rest| rest.is_empty() || rest.starts_with(char::is_whitespace)) {
            pieces.push(text.get(start..offset).unwrap_or_default());
            start = offset;
        }
        offset += line.len();
    }
    pieces.push(text.get(start..).unwrap_or_default());
    for piece in pieces {
        match serde_saphyr::from_str_with_options::<Option<Manifest>>(piece, yaml_options()) {
            Ok(None) => {}
            Ok(Some(manifest)) => {
                number += 1;
                take(manifest, number, &mut documents);
            }
            Err(error) => {
                number += 1;
                documents.broken.push(ManifestError {
                    document: number,
                    pod: name_of_broken(piece),
                    text: error.to_string(),
                });
            }
        }
    }
    documents
}

/// Reads JSON documents one after another. False when the text is not JSON from its first document on, in which case
/// it may still be YAML in flow style.
fn read_json(text: &str, documents: &mut Documents) -> bool {
    let mut number = 0;
    for manifest in serde_json::Deserializer::from_str(text).into_iter::<Manifest>() {
        number += 1;
        match manifest {
            Ok(manifest) => take(manifest, number, documents),
            Err(error) if error.is_syntax() && number == 1 => return false,
            Err(error) => {
                let pod = name_of_broken(text).filter(|_| number == 1);
                documents.broken.push(ManifestError { document: number, pod, text: error.to_string() });
                break;
            }
        }
    }
    true
}

fn yaml_options() -> serde_saphyr::Options {
    // Snippets would quote the document in the log. The budget is for lists of thousands of whole pods.
    serde_saphyr::options! {
        with_snippet: false,
        budget: serde_saphyr::budget! { max_events: 16_000_000, max_nodes: 8_000_000 },
    }
}

fn take(manifest: Manifest, document: usize, documents: &mut Documents) {
    match manifest.kind.as_deref() {
        Some("List" | "PodList") => {
            manifest.items.into_iter().flatten().for_each(|item| take_item(item, "Pod", document, documents));
        }
        Some("ModelAdapterList") => {
            manifest.items.into_iter().flatten().for_each(|item| take_item(item, ADAPTER, document, documents));
        }
        _ => take_item(manifest, "Pod", document, documents),
    }
}

/// Takes one object. The items of a typed list have no kind of their own.
fn take_item(item: Manifest, kind: &str, document: usize, documents: &mut Documents) {
    match item.kind.as_deref().unwrap_or(kind) {
        "Pod" => take_pod(item, document, documents),
        ADAPTER => take_adapter(item, document, documents),
        _ => foreign(&item, document, documents),
    }
}

fn take_adapter(manifest: Manifest, document: usize, documents: &mut Documents) {
    let metadata = manifest.metadata.unwrap_or_default();
    // As from the API server: an adapter that is being deleted takes no new requests.
    if metadata.deletion_timestamp.is_some() {
        return;
    }
    let Some(name) = metadata.name.filter(|name| !name.is_empty()) else {
        let text = "metadata.name is missing".to_owned();
        documents.broken.push(ManifestError { document, pod: None, text });
        return;
    };
    let namespace = metadata.namespace.filter(|namespace| !namespace.trim().is_empty());
    let instances = manifest.status.and_then(|status| status.instances).unwrap_or_default();
    documents.adapters.push(AdapterSpec {
        namespace: namespace.map_or_else(|| Arc::from("default"), Arc::from),
        name: Arc::from(name),
        instances: instances.into_iter().map(Arc::from).collect(),
    });
}

fn take_pod(manifest: Manifest, document: usize, documents: &mut Documents) {
    let named = manifest.metadata.as_ref().and_then(|metadata| metadata.name.as_deref()).unwrap_or_default();
    if named.is_empty() {
        let text = "metadata.name is missing".to_owned();
        documents.broken.push(ManifestError { document, pod: None, text });
    } else {
        documents.pods.push(manifest);
    }
}

fn foreign(manifest: &Manifest, document: usize, documents: &mut Documents) {
    let kind = manifest.kind.as_deref().unwrap_or_default();
    documents
        .foreign
        .push(format!("document {document} is of kind {kind:?}, neither Pod nor ModelAdapter; it is ignored"));
}

/// The pod's name in a document whose types are wrong, or else the first thing that looks like `name:` in it.
fn name_of_broken(piece: &str) -> Option<String> {
    #[derive(Deserialize)]
    struct Named {
        metadata: NameOnly,
    }
    #[derive(Deserialize)]
    struct NameOnly {
        name: String,
    }
    if let Ok(named) = serde_saphyr::from_str_with_options::<Named>(piece, yaml_options()) {
        return Some(named.metadata.name);
    }
    piece.match_indices("name").find_map(|(at, word)| {
        let opens = |c: char| c.is_whitespace() || "{,\"'".contains(c);
        if !piece.get(..at)?.chars().next_back().is_none_or(opens) {
            return None;
        }
        let rest = piece.get(at + word.len()..)?.trim_start_matches(['"', '\'']).strip_prefix(':')?;
        let value = rest.trim_start_matches([' ', '"', '\'']);
        let name: String =
            value.chars().take(253).take_while(|c| c.is_ascii_alphanumeric() || "-.".contains(*c)).collect();
        (!name.is_empty()).then_some(name)
    })
}
