//! The artifact's side of a volume: `ngram_table` in the text component's config, and the known row formats.

use infernix_formats::Format;
use infernix_formats::ggml::GgmlType;
use serde_json::{Map, Value, json};

use super::header::{BLOCK_BYTES, Geometry};
use crate::{ArtifactId, Directory};

/// Row formats with a known width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowFormat {
    /// One E4M3 byte per value, times the table's scale.
    Fp8E4m3fn,
    /// One BF16 word per value.
    Bf16,
    /// E2M1 codes (low nibble first), then one E4M3 scale per 16 values; the table's scale multiplies.
    Nvfp4Mul,
    /// As above; the table's scale divides.
    Nvfp4,
    /// GGML blocks of a type.
    Ggml(GgmlType),
}

impl RowFormat {
    /// Those with a fixed name; formats of GGML blocks are beside them.
    pub const ALL: [Self; 4] = [Self::Fp8E4m3fn, Self::Bf16, Self::Nvfp4Mul, Self::Nvfp4];

    /// Name in headers and configs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fp8E4m3fn => "fp8_e4m3fn",
            Self::Bf16 => "bf16",
            Self::Nvfp4Mul => "nvfp4_mul",
            Self::Nvfp4 => "nvfp4",
            Self::Ggml(t) => Format::Ggml(t).name(),
        }
    }

    /// The format of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.name() == name).or_else(|| match name.parse() {
            Ok(Format::Ggml(t)) => Some(Self::Ggml(t)),
            _ => None,
        })
    }

    /// Bytes of a row of `width` values; `None` where the width is no multiple of the format's block.
    pub fn row_bytes(self, width: u32) -> Option<u32> {
        let blocks = |size: u32| (width % size == 0).then_some(width / size);
        match self {
            Self::Fp8E4m3fn => Some(width),
            Self::Bf16 => width.checked_mul(2),
            Self::Nvfp4Mul | Self::Nvfp4 => blocks(16)?.checked_mul(9),
            Self::Ggml(t) => {
                let width = u64::from(width);
                u32::try_from(t.row_bytes(width).ok()?).ok()
            }
        }
    }
}

/// Rows of one layer's table within the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableRange {
    /// Layer index.
    pub layer: u64,
    /// First row.
    pub first_row: u64,
    /// Number of rows.
    pub rows: u64,
}

/// `ngram_table` of the text config.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NgramTable {
    /// Row format name.
    pub format: String,
    /// Where rows lie.
    pub geometry: Geometry,
    /// The volume's id.
    pub volume_id: ArtifactId,
    /// Tables of several layers, ascending, without gaps; empty for one table.
    pub tables: Vec<TableRange>,
}

impl NgramTable {
    /// Reads `ngram_table` of the text component; `Ok(None)` for a model without one.
    ///
    /// # Errors
    /// Which member is missing or inconsistent.
    pub fn of(directory: &Directory) -> Result<Option<Self>, String> {
        let table = directory.components.get("text").and_then(|text| text.config.get("ngram_table"));
        table.map(Self::from_value).transpose()
    }

    /// Reads the record.
    ///
    /// # Errors
    /// Which member is missing or inconsistent.
    pub fn from_value(value: &Value) -> Result<Self, String> {
        let integer = |value: &Value, key: &str| {
            value.get(key).and_then(Value::as_u64).ok_or_else(|| format!("ngram_table.{key} is no integer"))
        };
        let text = |key: &str| {
            value.get(key).and_then(Value::as_str).ok_or_else(|| format!("ngram_table.{key} is no string"))
        };
        let row_bytes =
            u32::try_from(integer(value, "row_bytes")?).map_err(|e| format!("ngram_table.row_bytes: {e}"))?;
        let geometry =
            Geometry::new(integer(value, "rows")?, row_bytes).map_err(|e| format!("ngram_table: {e}"))?;
        for (key, expected) in [
            ("rows_per_block", u64::from(geometry.rows_per_block)),
            ("block_bytes", BLOCK_BYTES),
            ("header_bytes", BLOCK_BYTES),
            ("blocks", geometry.blocks()),
            ("file_bytes", geometry.file_bytes()),
        ] {
            let found = integer(value, key)?;
            if found != expected {
                return Err(format!("ngram_table.{key} is {found}, its rows need {expected}"));
            }
        }
        let tables = match value.get("tables") {
            None => Vec::new(),
            Some(tables) => {
                let tables = tables.as_array().ok_or("ngram_table.tables is no array")?;
                let range = |t: &Value| {
                    Ok(TableRange {
                        layer: integer(t, "layer")?,
                        first_row: integer(t, "first_row")?,
                        rows: integer(t, "rows")?,
                    })
                };
                tables.iter().map(range).collect::<Result<Vec<_>, String>>()?
            }
        };
        let volume_id = text("volume_id")?.parse().map_err(|e| format!("ngram_table.volume_id: {e}"))?;
        let table = Self { format: text("format")?.to_owned(), geometry, volume_id, tables };
        table.check_tables()?;
        Ok(table)
    }

    fn check_tables(&self) -> Result<(), String> {
        let (mut row, mut layer) = (0u64, None);
        for table in &self.tables {
            if table.first_row != row || layer.is_some_and(|l| table.layer <= l) || table.rows == 0 {
                return Err("ngram_table.tables are not in ascending layer order without gaps".into());
            }
            row = row.checked_add(table.rows).ok_or("ngram_table.tables: too many rows")?;
            layer = Some(table.layer);
        }
        if !self.tables.is_empty() && row != self.geometry.rows {
            return Err(format!("ngram_table.tables hold {row} rows, the volume {}", self.geometry.rows));
        }
        Ok(())
    }

    /// The record as it is stored in the config.
    pub fn to_value(&self) -> Value {
        let mut map = Map::new();
        let g = &self.geometry;
        map.insert("format".into(), self.format.as_str().into());
        for (key, value) in [
            ("rows", g.rows),
            ("row_bytes", g.row_bytes.into()),
            ("rows_per_block", g.rows_per_block.into()),
            ("block_bytes", BLOCK_BYTES),
            ("header_bytes", BLOCK_BYTES),
            ("blocks", g.blocks()),
            ("file_bytes", g.file_bytes()),
        ] {
            map.insert(key.into(), value.into());
        }
        map.insert("volume_id".into(), self.volume_id.to_string().into());
        if !self.tables.is_empty() {
            let tables = self.tables.iter();
            let tables = tables.map(|t| json!({"layer": t.layer, "first_row": t.first_row, "rows": t.rows}));
            map.insert("tables".into(), Value::Array(tables.collect()));
        }
        Value::Object(map)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn widths_of_the_published_table() {
        let widths = RowFormat::ALL.map(|format| format.row_bytes(160));
        assert_eq!(widths, [Some(160), Some(320), Some(90), Some(90)]);
        let nl = RowFormat::Ggml(GgmlType::Iq4Nl);
        assert_eq!((nl.row_bytes(160), nl.row_bytes(48)), (Some(90), None));
        assert_eq!(RowFormat::from_name("ggml_q8_0").and_then(|f| f.row_bytes(160)), Some(170));
        assert_eq!(RowFormat::from_name("ggml_iq4_nl"), Some(nl));
        assert_eq!(RowFormat::from_name("ggml_f32"), None);
    }

    #[test]
    fn records_round_trip_and_gaps_are_refused() {
        let mut table = NgramTable {
            format: "bf16".into(),
            geometry: Geometry::new(10, 8).unwrap(),
            volume_id: ArtifactId([3; 16]),
            tables: vec![
                TableRange { layer: 1, first_row: 0, rows: 4 },
                TableRange { layer: 5, first_row: 4, rows: 6 },
            ],
        };
        assert_eq!(NgramTable::from_value(&table.to_value()), Ok(table.clone()));
        table.tables[1].first_row = 5;
        assert!(NgramTable::from_value(&table.to_value()).is_err());
        table.tables = vec![TableRange { layer: 1, first_row: 0, rows: 4 }];
        assert!(NgramTable::from_value(&table.to_value()).is_err());
    }
}
