//! Where weights come from, and the check that each is used exactly once.

use crate::backend::WeightData;
use crate::error::EngineError;
use infernix_formats::Encoded;
use infernix_model::{Component, ModelConfig};
use std::collections::BTreeMap;

/// Named weights of a model.
pub trait WeightSource {
    /// The text model's configuration.
    fn config(&self) -> &ModelConfig;

    /// Whether a component is there.
    fn has_component(&self, component: Component) -> bool;

    /// All logical names, whatever the component.
    fn names(&self) -> Vec<String>;

    /// Whether there is such a weight.
    fn contains(&self, name: &str) -> bool;

    /// Its words.
    fn weight(&self, name: &str) -> Result<WeightData, EngineError>;

    /// Calibrated input scale of a linear in the convention of its weight (multiplier or divisor), if it has one.
    fn input_scale(&self, _name: &str) -> Option<f32> {
        None
    }

    /// For each stored column of a linear the activation element that it multiplies, where blocks keep another order than
    /// the model's.
    fn input_columns(&self, _name: &str) -> Result<Option<Vec<u32>>, EngineError> {
        Ok(None)
    }

    /// Bits of expert activations that the checkpoint specifies (4, 8 or 16).
    fn default_expert_activation(&self) -> u32 {
        16
    }
}

/// Reads weights and counts the reads.
pub struct Binder<'s> {
    source: &'s dyn WeightSource,
    used: BTreeMap<String, usize>,
}

impl<'s> Binder<'s> {
    /// A binder over a source.
    pub fn new(source: &'s dyn WeightSource) -> Self {
        Binder { source, used: BTreeMap::new() }
    }

    /// The source.
    pub fn source(&self) -> &'s dyn WeightSource {
        self.source
    }

    /// Takes a weight of a known shape (compared as rows x last axis).
    pub fn take(&mut self, name: &str, shape: &[usize]) -> Result<WeightData, EngineError> {
        if !self.source.contains(name) {
            return Err(EngineError::Weight { name: name.to_owned(), what: "is missing".into() });
        }
        *self.used.entry(name.to_owned()).or_default() += 1;
        let data = self.source.weight(name)?;
        let want: Vec<u64> = shape.iter().map(|d| *d as u64).collect();
        // Convolutions are stored [C, 1, K] and used [C, K].
        let squeezed: Vec<u64> = match data.shape[..] {
            [c, 1, k] => vec![c, k],
            _ => data.shape.clone(),
        };
        if squeezed != want {
            let what = format!("shape {:?}, expected {want:?}", data.shape);
            return Err(EngineError::Weight { name: name.to_owned(), what });
        }
        Ok(WeightData { shape: want, parts: data.parts })
    }

    /// Takes several weights as one, stacked by rows.
    pub fn take_stacked(&mut self, names: &[(String, usize)], k: usize) -> Result<WeightData, EngineError> {
        let mut all = WeightData { shape: vec![0, k as u64], parts: Vec::new() };
        for (name, rows) in names {
            let w = self.take(name, &[*rows, k])?;
            all.shape[0] += w.shape[0];
            all.parts.extend(w.parts);
        }
        Ok(all)
    }

    /// Takes a small weight as FP32 values.
    pub fn take_values(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>, EngineError> {
        let data = self.take(name, shape)?;
        let error = |source| EngineError::Source { name: name.to_owned(), source };
        let mut values = Vec::new();
        for p in &data.parts {
            let e = Encoded::new(p.layout, p.format, &p.shape, (*p.bytes).as_ref())
                .map_err(|e| error(e.into()))?;
            let k = e.row_shape().map_err(|e| error(e.into()))?.k;
            let mut rows = vec![0f32; ((p.rows.end - p.rows.start) * k) as usize];
            let view = e.rows(p.rows.clone()).map_err(|e| error(e.into()))?;
            view.decode_f32(&mut rows).map_err(|e| error(e.into()))?;
            values.extend(rows);
        }
        Ok(values)
    }

    /// Says that someone else reads a binding (the n-gram reader).
    pub fn note(&mut self, name: &str) {
        *self.used.entry(name.to_owned()).or_default() += 1;
    }

    /// Refuses bindings of the loaded components that were not used exactly once.
    pub fn check(&self, components: &[Component]) -> Result<(), EngineError> {
        let mut bad: Vec<String> =
            self.used.iter().filter(|(_, n)| **n != 1).map(|(k, n)| format!("{k} ({n} times)")).collect();
        for name in self.source.names() {
            let loaded = components
                .iter()
                .any(|c| name.starts_with(c.name()) && name[c.name().len()..].starts_with('/'));
            if loaded && !self.used.contains_key(&name) {
                bad.push(format!("{name} (unused)"));
            }
        }
        if bad.is_empty() { Ok(()) } else { Err(EngineError::Usage(bad)) }
    }
}

/// Weights held in memory, for tests and synthetic models.
pub struct MemorySource {
    /// Configuration.
    pub config: ModelConfig,
    /// Weights by logical name.
    pub weights: BTreeMap<String, WeightData>,
    /// Bits of expert activations.
    pub expert_activation: u32,
}

impl WeightSource for MemorySource {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn has_component(&self, component: Component) -> bool {
        let prefix = format!("{}/", component.name());
        self.weights.keys().any(|k| k.starts_with(&prefix))
    }

    fn names(&self) -> Vec<String> {
        self.weights.keys().cloned().collect()
    }

    fn contains(&self, name: &str) -> bool {
        self.weights.contains_key(name)
    }

    fn weight(&self, name: &str) -> Result<WeightData, EngineError> {
        self.weights
            .get(name)
            .cloned()
            .ok_or_else(|| EngineError::Weight { name: name.to_owned(), what: "is missing".into() })
    }

    fn default_expert_activation(&self) -> u32 {
        self.expert_activation
    }
}
