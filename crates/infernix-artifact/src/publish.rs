//! Publication: digests and directory into the files, then renames in the order volume, parts, report, entry. An entry
//! that exists is complete.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::digest::{artifact_id, directory_digest, quotable_digest};
use crate::draft::{INTEGRITY, integrity};
use crate::framing::{EntryHeader, HEADER_BYTES, part_header};
use crate::io::{file_name, folder_of};
use crate::ngram::VolumeWriter;
use crate::writer::{damaged, report_path};
use crate::{ArtifactError, ArtifactId, Digest, Result, Writer, sums};

/// What a report may want to say.
#[derive(Clone, Debug)]
pub struct Summary {
    /// Identity of the set.
    pub artifact_id: ArtifactId,
    /// The quotable digest, including the volume's rows.
    pub digest: Digest,
    /// Payload bytes by file name, entry first.
    pub files: Vec<(String, u64)>,
    /// Bytes of objects that an earlier run finished.
    pub resumed_bytes: u64,
}

/// Renders the report (`OUT.conversion.json`).
pub type Report<'a> = Box<dyn FnOnce(&Summary) -> Vec<u8> + 'a>;

/// What to publish besides the set.
#[derive(Default)]
pub struct PublishOptions<'a> {
    /// A finished volume of the same conversion.
    pub volume: Option<VolumeWriter>,
    /// Row digest of an existing volume that the set uses instead.
    pub reused_rows: Option<Digest>,
    /// Renders the report.
    pub report: Option<Report<'a>>,
    /// Write whole-file SHA-256 lines into the folder's `SHA256SUMS`.
    pub sha256sums: bool,
}

/// A file at its final place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublishedFile {
    /// Its path.
    pub path: PathBuf,
    /// Its length.
    pub bytes: u64,
}

/// The result of a publication.
#[derive(Clone, Debug)]
pub struct Publication {
    /// What the report was told.
    pub summary: Summary,
    /// The set's files, entry first.
    pub files: Vec<PublishedFile>,
    /// The volume, where one was written.
    pub volume: Option<PublishedFile>,
    /// The report, where one was written.
    pub report: Option<PathBuf>,
    /// Time spent on whole-file SHA-256, apart from the rate of the conversion itself.
    pub sha256_time: Duration,
}

impl Writer {
    /// Publishes the set. Every object, and the volume if there is one, must be finished.
    ///
    /// # Errors
    /// Unfinished objects, an occupied target, I/O errors. State stays resumable; repeating the call in a new run
    /// continues where this one stopped.
    pub fn publish(self, options: PublishOptions<'_>) -> Result<Publication> {
        if let Some(i) = (0..self.objects().len()).find(|&i| !self.is_done(i)) {
            let reason = "is not finished; the set cannot be published".into();
            return Err(ArtifactError::Coverage { object: self.directory.objects[i].id.clone(), reason });
        }
        self.checkpoint()?;
        let mut directory = self.directory.clone();
        self.apply_late(&mut directory)?;
        let digests = self.digests();
        let id = artifact_id(&directory, &digests);
        let record =
            |d| integrity(directory.objects.iter().map(|o| (o.id.as_str(), digests.get(&o.id).copied())), d);
        let mut signed = directory.clone();
        signed.provenance.get_or_insert_default().insert(INTEGRITY.into(), record(None));
        let seal = directory_digest(&signed, id);
        signed.provenance.get_or_insert_default().insert(INTEGRITY.into(), record(Some(seal)));
        if self.publishing.is_some_and(|earlier| earlier != id) {
            return Err(damaged(&self.state, "the set that was being published had another id"));
        }
        self.write_headers(&signed, id)?;

        let rows = options.volume.as_ref().and_then(VolumeWriter::row_digest).or(options.reused_rows);
        let summary = Summary {
            artifact_id: id,
            digest: quotable_digest(&signed, &digests, rows),
            files: self.files.iter().map(|file| (file.plan.name.clone(), file.plan.payload_bytes)).collect(),
            resumed_bytes: self.resumed_bytes(),
        };
        let report = self.prepare_report(options.report, &summary)?;
        let started = Instant::now();
        let lines = if options.sha256sums {
            self.sums(options.volume.as_ref(), report.as_ref())?
        } else {
            Vec::new()
        };
        let sha256_time = started.elapsed();
        if self.publishing.is_none() {
            self.state.append(&[json!({"publish": id.to_string()})])?;
        }

        let folder = folder_of(&self.out);
        if let Some(volume) = &options.volume {
            volume.publish()?;
        }
        for file in self.files.iter().skip(1).filter(|file| file.file.is_some()) {
            self.io.rename_new(&file.temporary, &file.target)?;
        }
        if let Some((temporary, target)) = &report
            && temporary.exists()
        {
            self.io.rename_new(temporary, target)?;
        }
        self.io.sync_folder(folder)?;
        let mut folders: BTreeMap<PathBuf, Vec<(String, String)>> = BTreeMap::new();
        for (path, hash) in lines {
            folders
                .entry(folder_of(&path).to_owned())
                .or_default()
                .push((file_name(&path)?.to_owned(), hash));
        }
        for (folder, lines) in &folders {
            sums::update(folder, &[], lines, &self.io)?;
        }
        let entry = &self.files[0];
        self.io.rename_new(&entry.temporary, &entry.target)?;
        self.io.sync_folder(folder)?;

        let mut names: Vec<String> = vec!["report.json".into()];
        let volume = options.volume.as_ref().map(|volume| {
            names.extend(volume.state_names());
            PublishedFile { path: volume.target().to_owned(), bytes: volume.geometry().file_bytes() }
        });
        self.state.remove(&names)?;
        self.io.sync_folder(folder)?;
        let files = self.files.iter();
        let files = files
            .map(|file| PublishedFile { path: file.target.clone(), bytes: file.plan.file_bytes })
            .collect();
        Ok(Publication { summary, files, volume, report: report.map(|(_, target)| target), sha256_time })
    }

    fn apply_late(&self, directory: &mut crate::Directory) -> Result<()> {
        let values = self.late_values.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(missing) = self.late.iter().find(|pointer| !values.contains_key(*pointer)) {
            return Err(ArtifactError::Invalid(format!("late value {missing:?} was never set")));
        }
        if values.is_empty() {
            return Ok(());
        }
        let mut value = directory.to_value();
        for (pointer, text) in values.iter() {
            if let Some(slot) = value.pointer_mut(pointer) {
                *slot = Value::from(text.as_str());
            }
        }
        *directory = crate::parse_directory(&self.out, crate::json::canonical(&value).as_bytes())?;
        Ok(())
    }

    fn write_headers(&self, directory: &crate::Directory, id: ArtifactId) -> Result<()> {
        let mut text = directory.to_stored_json().into_bytes();
        if text.len() as u64 > self.json_bytes {
            return Err(ArtifactError::Invalid("the directory outgrew its reserve".into()));
        }
        text.resize(self.json_bytes as usize, b' ');
        for (index, out) in self.files.iter().enumerate() {
            let Some(file) = &out.file else { continue };
            if index == 0 {
                let header = EntryHeader { json_bytes: self.json_bytes, artifact_id: id };
                self.io.write_at(file, &out.temporary, &text, HEADER_BYTES)?;
                self.io.write_at(file, &out.temporary, &header.encode(), 0)?;
            } else {
                self.io.write_at(file, &out.temporary, &part_header(index as u64, id), 0)?;
            }
            self.io.sync(file, &out.temporary)?;
        }
        Ok(())
    }

    /// Writes the report into the state folder; returns (temporary, target). A report that an earlier run published
    /// stays as it is.
    fn prepare_report(
        &self,
        report: Option<Report<'_>>,
        summary: &Summary,
    ) -> Result<Option<(PathBuf, PathBuf)>> {
        let Some(render) = report else { return Ok(None) };
        let (temporary, target) = (self.state.folder.join("report.json"), report_path(&self.out));
        let published = self.publishing.is_some() && target.exists();
        if !published {
            self.io.write_file(&temporary, &render(summary))?;
        }
        Ok(Some((temporary, target)))
    }

    fn sums(
        &self,
        volume: Option<&VolumeWriter>,
        report: Option<&(PathBuf, PathBuf)>,
    ) -> Result<Vec<(PathBuf, String)>> {
        let mut files: Vec<(PathBuf, PathBuf)> =
            self.files.iter().map(|file| (file.temporary.clone(), file.target.clone())).collect();
        files.extend(volume.map(|v| (v.temporary().to_owned(), v.target().to_owned())));
        files.extend(report.cloned());
        let present = |(temporary, target): &(PathBuf, PathBuf)| {
            if temporary.exists() { temporary.clone() } else { target.clone() }
        };
        let paths: Vec<PathBuf> = files.iter().map(present).collect();
        let hashes = sums::hash_files(&paths, &self.io.interrupt)?;
        Ok(files.into_iter().map(|(_, target)| target).zip(hashes).collect())
    }
}
