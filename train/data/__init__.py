"""Data: documents or token shards in, batches of tokens on the devices out."""

from train.data.batches import Batch as Batch
from train.data.batches import held_out_batches as held_out_batches
from train.data.batches import training_batches as training_batches
from train.data.corpus import Corpus as Corpus
from train.data.corpus import find_tokenizer as find_tokenizer
from train.data.corpus import load_corpus as load_corpus
from train.data.corpus import unigram_loss as unigram_loss
from train.data.documents import DataError as DataError
from train.data.workers import WorkerError as WorkerError
