"""What every gRPC server and client of Genlock shares. No decisions are made here."""
