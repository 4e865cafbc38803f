"""What people read: tables, documents, pages."""
