-- The tables of a database that the first version made, and an object of each API in them.
CREATE TABLE batches (
  endpoint VARCHAR(64) NOT NULL,
  input_file_id VARCHAR(64) NOT NULL,
  completion_window VARCHAR(8) NOT NULL,
  output_expires_after INTEGER,
  served_model TEXT NOT NULL,
  model TEXT,
  status VARCHAR(16) NOT NULL,
  errors JSON,
  labels JSON,
  output_file_id VARCHAR(64),
  error_file_id VARCHAR(64),
  created_at BIGINT NOT NULL,
  expires_at BIGINT NOT NULL,
  in_progress_at BIGINT,
  finalizing_at BIGINT,
  completed_at BIGINT,
  failed_at BIGINT,
  expired_at BIGINT,
  cancelling_at BIGINT,
  cancelled_at BIGINT,
  total INTEGER NOT NULL,
  completed INTEGER NOT NULL,
  failed INTEGER NOT NULL,
  input_tokens BIGINT NOT NULL,
  cached_tokens BIGINT NOT NULL,
  output_tokens BIGINT NOT NULL,
  reasoning_tokens BIGINT NOT NULL,
  number INTEGER NOT NULL,
  id VARCHAR(64) NOT NULL,
  PRIMARY KEY (number),
  UNIQUE (id)
);
CREATE INDEX ix_batches_status ON batches (status);
CREATE TABLE files (
  bytes BIGINT NOT NULL,
  created_at BIGINT NOT NULL,
  expires_at BIGINT,
  filename TEXT NOT NULL,
  purpose VARCHAR(32) NOT NULL,
  number INTEGER NOT NULL,
  id VARCHAR(64) NOT NULL,
  PRIMARY KEY (number),
  UNIQUE (id)
);
CREATE TABLE conversations (
  id VARCHAR(64) NOT NULL,
  created_at INTEGER NOT NULL,
  attached BLOB NOT NULL,
  PRIMARY KEY (id)
);
CREATE TABLE responses (
  id VARCHAR(64) NOT NULL,
  status VARCHAR(16) NOT NULL,
  previous_response_id VARCHAR(64),
  body BLOB NOT NULL,
  events BLOB,
  alive_until FLOAT,
  PRIMARY KEY (id)
);
CREATE TABLE conversation_items (
  number INTEGER NOT NULL,
  conversation_id VARCHAR(64) NOT NULL,
  item_id VARCHAR(128) NOT NULL,
  body BLOB NOT NULL,
  PRIMARY KEY (number),
  UNIQUE (conversation_id, item_id),
  FOREIGN KEY(conversation_id) REFERENCES conversations (id) ON DELETE CASCADE
);
CREATE INDEX ix_conversation_items_conversation_id ON conversation_items (conversation_id);
CREATE INDEX ix_conversation_items_item_id ON conversation_items (item_id);
CREATE TABLE response_items (
  response_id VARCHAR(64) NOT NULL,
  position INTEGER NOT NULL,
  item_id VARCHAR(128) NOT NULL,
  is_output BOOLEAN NOT NULL,
  body BLOB NOT NULL,
  PRIMARY KEY (response_id, position),
  FOREIGN KEY(response_id) REFERENCES responses (id) ON DELETE CASCADE
);
CREATE INDEX ix_response_items_item_id ON response_items (item_id);
INSERT INTO files (id, bytes, created_at, expires_at, filename, purpose)
  VALUES ('file-1', 3, 1700000000, NULL, 'in.jsonl', 'batch');
INSERT INTO batches (id, endpoint, input_file_id, completion_window, served_model, status, created_at, expires_at, completed_at,
    total, completed, failed, input_tokens, cached_tokens, output_tokens, reasoning_tokens)
  VALUES ('batch_1', '/v1/completions', 'file-1', '24h', 'fake', 'completed', 1700000000, 1700086400, 1700000001, 1, 1, 0, 4, 0, 2, 0);
INSERT INTO conversations VALUES ('conv_1', 1700000000, '{"topic":"capitals"}');
INSERT INTO conversation_items (conversation_id, item_id, body)
  VALUES ('conv_1', 'msg_1', '{"type":"message","id":"msg_1","role":"user","content":[{"type":"input_text","text":"Hi"}],"status":"completed"}');
INSERT INTO responses (id, status, previous_response_id, body)
  VALUES ('resp_1', 'completed', NULL, '{"id":"resp_1","created_at":1700000005,"status":"completed","model":"fake","output":[]}');
